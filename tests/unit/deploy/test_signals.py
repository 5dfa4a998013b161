import os
import signal
from collections.abc import Iterator

import pytest

from deploy.signals import StopRequested, StopSwitch


@pytest.fixture
def switch() -> Iterator[StopSwitch]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    installed = StopSwitch()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_interrupts(switch: StopSwitch, number: signal.Signals) -> None:
    with pytest.raises(StopRequested), switch.interrupting():
        send(number)
    assert switch.thrown


def test_a_signal_while_serving_wakes_the_one_who_waits(switch: StopSwitch) -> None:
    assert not switch.wait(0)

    send(signal.SIGTERM)

    assert switch.wait(0)


def test_a_second_signal_does_not_cut_stopping_short(switch: StopSwitch) -> None:
    reached = False
    with pytest.raises(StopRequested), switch.interrupting():  # noqa: PT012 - the second signal is the point
        try:
            send(signal.SIGINT)
        finally:
            send(signal.SIGINT)
            reached = True

    assert reached


def test_a_switch_thrown_before_the_start_prevents_it(switch: StopSwitch) -> None:
    send(signal.SIGTERM)

    with pytest.raises(StopRequested), switch.interrupting():
        raise AssertionError("started")


def test_no_handler_of_errors_swallows_a_stop() -> None:
    assert not issubclass(StopRequested, Exception)
