"""Transfers between two worker halves, from the engine's steps to the pages."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from kv_transfer.api import desk
from kv_transfer.api.errors import TransferCause
from kv_transfer.api.handoff import HandoffOutcome
from kv_transfer.connector.gauges import GaugeServer
from kv_transfer.connector.metadata import Held, StepOrders
from kv_transfer.connector.worker_side import CourierDied
from tests.support.members import MEMBERSHIP
from tests.support.worker_pair import (
    BLOCK,
    PROMPT,
    Worker,
    announced,
    asked,
    computed,
    some_steps,
    until,
    worker,
)


def test_a_page_leaves_when_its_last_slot_is_written_and_not_before(pair: tuple[Worker, Worker]) -> None:
    """The second chunk fills a page that the first one began: shipping it early would lose the rest."""
    prefill, decode = pair
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (7, 8, 9)))
    prefill.write(3, 1.0)
    prefill.write(4, 99.0)  # half-written: page 4 is not complete after six tokens
    prefill.step(computed("t", (3, 4), 6))
    some_steps(prefill, decode)
    assert decode.received == []

    prefill.write(4, 2.0)
    prefill.write(5, 3.0)
    prefill.step(computed("t", (3, 4, 5), PROMPT))
    until((prefill, decode), lambda: decode.received == ["d-t"])

    for layer in ("layer0", "layer1"):
        assert torch.equal(decode.caches[layer][[7, 8, 9]], prefill.caches[layer][[3, 4, 5]])
    assert decode.caches["layer0"][:7].abs().sum() == 0
    report = decode.reports["d-t"]
    assert (report.outcome, report.pages, report.wire_bytes) == (
        HandoffOutcome.SHIPPED,
        3,
        3 * 2 * BLOCK * 8 * 4,
    )


def test_pages_of_a_finished_request_are_held_until_decode_has_them(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    prefill.step(computed("t", (3, 4, 5), PROMPT))
    prefill.step(StepOrders(held=[Held("t", "p-t")]))
    some_steps(prefill)
    assert prefill.sent == set()

    decode.step(asked("t", prefill, (1,), first_page=2))
    until((prefill, decode), lambda: prefill.sent == {"p-t"})

    assert decode.received == ["d-t"]


def test_a_preempted_request_ships_its_new_pages_never_its_lost_ones(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.write(3, 1.0)
    prefill.step(announced("t"))
    prefill.step(computed("t", (3, 4, 5), 6))
    prefill.step(StepOrders(suspended=["t"]))
    prefill.write(3, 50.0)  # now somebody else's
    decode.step(asked("t", prefill, (1, 2, 6)))
    some_steps(prefill, decode)
    assert decode.received == []

    for page, value in ((10, 1.0), (11, 2.0), (12, 3.0)):
        prefill.write(page, value)
    prefill.step(computed("t", (10, 11, 12), PROMPT))
    until((prefill, decode), lambda: decode.received == ["d-t"])

    assert torch.equal(decode.caches["layer1"][[1, 2, 6]], prefill.caches["layer1"][[10, 11, 12]])


def test_a_request_that_is_preempted_after_its_first_page_left_goes_on_with_the_second(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.write(3, 1.0)
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (1, 2, 6)))
    some_steps(prefill, decode)
    prefill.step(computed("t", (3, 4, 5), 6))  # page 3 leaves
    some_steps(prefill, decode)
    prefill.step(StepOrders(suspended=["t"]))
    prefill.write(3, 50.0)  # now somebody else's
    some_steps(prefill, decode)

    for page, value in ((10, 1.0), (11, 2.0), (12, 3.0)):
        prefill.write(page, value)
    prefill.step(computed("t", (10, 11, 12), PROMPT))
    until((prefill, decode), lambda: decode.received == ["d-t"])

    assert decode.failed == set()
    assert torch.equal(decode.caches["layer1"][[1, 2, 6]], prefill.caches["layer1"][[10, 11, 12]])
    assert decode.reports["d-t"].pages == 3


def test_a_prefill_engine_with_fewer_ranks_fails_the_transfer_and_not_the_engine(tmp_path: Path) -> None:
    """What this rank does not need it cannot decline either: there is nobody to tell."""
    prefill, second = worker("prefill", tmp_path), worker("decode", tmp_path, rank=1)
    try:
        second.step(StepOrders(declines=[asked("t", prefill, (1,)).receives[0].ticket]))
        second.step(asked("u", prefill, (1,)))
        until((second,), lambda: second.received == ["d-u"])
    finally:
        prefill.side.close()
        second.side.close()

    assert second.failed == {"d-u"}
    assert second.reports["d-u"].cause is TransferCause.PROTOCOL


def test_a_prefill_request_that_dies_fails_the_receive_at_once(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (1, 2, 3)))
    prefill.step(computed("t", (3, 4), 6))
    prefill.step(StepOrders(dropped=["t"]))

    until((prefill, decode), lambda: decode.received == ["d-t"])

    assert decode.failed == {"d-t"}
    assert decode.reports["d-t"].cause is TransferCause.PREFILL_ENDED
    assert decode.caches["layer0"].abs().sum() == 0


def test_a_cancelled_receive_is_reported_once_and_its_pages_are_left_alone(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.write(3, 1.0)
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (1, 2, 3)))
    decode.step(StepOrders(cancels=["t"]))
    until((prefill, decode), lambda: decode.received == ["d-t"])
    prefill.step(computed("t", (3, 4, 5), PROMPT))
    prefill.step(StepOrders(held=[Held("t", "p-t")]))
    until((prefill, decode), lambda: prefill.sent == {"p-t"})
    some_steps(prefill, decode)

    assert decode.received == ["d-t"]
    assert decode.caches["layer0"].abs().sum() == 0


def test_a_declined_transfer_frees_the_pages_of_prefill(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    ticket = asked("t", prefill, (1,)).receives[0].ticket
    decode.step(StepOrders(declines=[ticket]))
    prefill.step(computed("t", (3, 4, 5), PROMPT))
    prefill.step(StepOrders(held=[Held("t", "p-t")]))

    until((prefill, decode), lambda: prefill.sent == {"p-t"})

    assert decode.received == []


def test_many_transfers_share_one_link_and_each_gets_its_own_pages(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    for number in range(5):
        prefill.write(number + 1, 10.0 + number)
        prefill.step(announced(f"t{number}"))
        decode.step(asked(f"t{number}", prefill, (15 - number,)))
    for number in reversed(range(5)):
        prefill.step(computed(f"t{number}", (number + 1,), PROMPT))

    until((prefill, decode), lambda: len(decode.received) == 5)

    for number in range(5):
        assert torch.equal(decode.caches["layer1"][15 - number], prefill.caches["layer1"][number + 1])


def test_a_superseded_receive_writes_nothing(pair: tuple[Worker, Worker]) -> None:
    """Its pages may belong to another request by the time its bytes are here."""
    prefill, decode = pair
    for number, transfer_id in enumerate(("old", "new"), start=1):
        prefill.write(number, float(number))
        prefill.step(announced(transfer_id))
        order = asked(transfer_id, prefill, (number,)).receives[0]
        decode.step(StepOrders(receives=[replace(order, request_id="same")]))
    prefill.step(computed("old", (1,), PROMPT))
    prefill.step(computed("new", (2,), PROMPT))

    until((prefill, decode), lambda: decode.received == ["same"])
    some_steps(prefill, decode)

    assert decode.received == ["same"]
    assert decode.caches["layer0"][1].abs().sum() == 0
    assert torch.equal(decode.caches["layer0"][2], prefill.caches["layer0"][2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_courier_died_does_not_go_on(pair: tuple[Worker, Worker]) -> None:
    """Its transfers would hang until their deadlines; its replica must be replaced instead."""
    _, decode = pair
    order = asked("t", pair[0], (1,)).receives[0]
    nowhere = replace(order.ticket, peer_addresses=("not an address",))

    def keep_stepping() -> None:
        decode.step(StepOrders(receives=[replace(order, ticket=nowhere)]))
        some_steps(decode)

    with pytest.raises(CourierDied):
        keep_stepping()


def test_pages_held_for_a_decode_engine_that_dies_go_free_without_waiting_for_their_deadline(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (1, 2, 3)))
    some_steps(prefill, decode)
    prefill.step(StepOrders(held=[Held("t", "p-t")]))

    decode.side.close()

    until((prefill,), lambda: prefill.sent == {"p-t"})


def test_a_receive_from_a_prefill_engine_that_dies_fails_without_waiting_for_its_deadline(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    decode.step(asked("t", prefill, (1, 2, 3)))
    some_steps(prefill, decode)
    assert decode.received == []

    prefill.side.close()

    until((decode,), lambda: decode.failed == {"d-t"})
    assert decode.reports["d-t"].cause is TransferCause.LINK_DOWN


def test_pages_that_nobody_will_fetch_are_released_by_the_engines_desk(
    pair: tuple[Worker, Worker], tmp_path: Path
) -> None:
    prefill, _ = pair
    server = GaugeServer(f"ipc://{tmp_path}/desk", MEMBERSHIP)
    server.bind_workers([prefill.side.address()])
    prefill.step(announced("t"))
    prefill.step(StepOrders(held=[Held("t", "p-t")]))
    some_steps(prefill)
    assert prefill.sent == set()

    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        MEMBERSHIP.client(socket)
        socket.connect(f"ipc://{tmp_path}/desk")
        socket.send(desk.encode(desk.ReleaseTransfer(transfer_id="t")))
        assert socket.poll(5000)

    until((prefill,), lambda: prefill.sent == {"p-t"})
    server.close()


def listening() -> set[int]:
    """Ports on which this process takes TCP connections."""
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_where_two_workers_met_nobody_listens_afterwards(pair: tuple[Worker, Worker]) -> None:
    """The store has no authentication: it is open only while a link is built."""
    prefill, decode = pair
    before = listening()
    decode.step(asked("t", prefill, (1, 2, 3)))
    some_steps(prefill, decode)
    (meeting_point,) = listening() - before

    prefill.step(announced("t"))
    prefill.step(computed("t", (3, 4, 5), PROMPT))
    until((prefill, decode), lambda: decode.received == ["d-t"])

    assert meeting_point not in listening()
