import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.signals import FROM_TERMINAL, TOLD_TO_STOP, StopRequested, StopSwitch, deaf_children


@pytest.fixture
def switch() -> Iterator[StopSwitch]:
    before = {number: signal.getsignal(number) for number in TOLD_TO_STOP}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    installed = StopSwitch()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", TOLD_TO_STOP)
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


def test_a_hangup_that_nohup_has_switched_off_stays_off() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        switch = StopSwitch()
        switch.install()
        send(signal.SIGHUP)

        assert not switch.thrown
    finally:
        signal.signal(signal.SIGHUP, before)
        for number, handler in others.items():
            signal.signal(number, handler)


def test_a_step_that_must_be_whole_is_interrupted_at_its_end(switch: StopSwitch) -> None:
    made = noted = False
    with pytest.raises(StopRequested), switch.interrupting(), switch.held_back():  # noqa: PT012
        made = True
        send(signal.SIGTERM)
        noted = True

    assert (made, noted) == (True, True)


def test_a_step_that_must_be_whole_outside_a_start_only_notes_the_signal(switch: StopSwitch) -> None:
    with switch.held_back():
        send(signal.SIGTERM)

    assert switch.thrown


def test_children_do_not_hear_what_the_terminal_sends_to_its_whole_group() -> None:
    mask = "import signal; print(*sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"
    with deaf_children():
        inside = subprocess.run([sys.executable, "-c", mask], capture_output=True, text=True, check=True)
    outside = subprocess.run([sys.executable, "-c", mask], capture_output=True, text=True, check=True)

    assert set(map(int, inside.stdout.split())) == set(FROM_TERMINAL)
    assert outside.stdout.split() == []
