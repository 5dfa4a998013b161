"""What is not shipped, and not taken in: pages that are not, or turn out not to be, the request's own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.faults import PageFaultKind
from kv_transfer.api.handoff import Role, Ticket
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.connector.metadata import CheckOrders, Held, ReceiveOrder, SendProgress, StepOrders
from kv_transfer.connector.receiver import Outcome, PageGroup
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.connector.worker_side import Finished
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.device import Seen, Sighting, Verdicts
from kv_transfer.integrity.prestep import Rights
from kv_transfer.integrity.verify import Finding
from kv_transfer.testing.table_faults import TableFault
from tests.support.real_scheduler import cache_config
from tests.support.worker_pair import (
    BLOCK,
    NO_CACHE,
    PROMPT,
    Worker,
    announced,
    asked,
    computed,
    some_steps,
    until,
    worker,
)

ONE_GROUP = cache_config(20)


def checked(worker: Worker, tags: dict[int, int]) -> None:
    """From now on this worker knows these pages' tags."""
    worker.side.check = StepCheck(ONE_GROUP, checked=True)
    tell(worker, tags)


def tell(worker: Worker, tags: dict[int, int]) -> None:
    worker.side.check.before_step(CheckOrders(LedgerDelta(tags=dict(tags)), {}, Rights()), [], [])


@pytest.mark.parametrize("changed", [False, True], ids=["as ordered", "changed hands"])
def test_pages_are_written_only_while_they_have_the_tags_of_the_order(
    pair: tuple[Worker, Worker], changed: bool
) -> None:
    """Pages 7, 8 and 9 are ordered; page 8 is another request's by the time that bytes come."""
    prefill, decode = pair
    tags = {7: 70, 8: 80, 9: 90}
    checked(decode, tags)
    prefill.step(announced("t"))
    order = replace(asked("t", prefill, tuple(tags)).receives[0], tags=tuple(tags.values()))
    decode.step(StepOrders(receives=[order]))
    if changed:
        tell(decode, {8: 81})
    for page in (3, 4, 5):
        prefill.write(page, float(page))
    prefill.step(computed("t", (3, 4, 5), PROMPT))

    until((prefill, decode), lambda: decode.received == ["d-t"])

    written = [bool(decode.caches["layer0"][page].any()) for page in tags]
    assert written == [not changed] * 3
    stale = {"d-t": PageFault(IntegrityCause.STALE_TRANSFER, 8, 80, 81)}
    assert decode.faults == (stale if changed else {})


@pytest.mark.parametrize("changed", [False, True], ids=["as given", "changed hands"])
def test_pages_are_shipped_only_while_they_have_the_tags_under_which_they_were_given(
    pair: tuple[Worker, Worker], changed: bool
) -> None:
    """Held until they are fetched; page 4 is another request's by then."""
    prefill, decode = pair
    tags = {3: 30, 4: 40, 5: 50}
    checked(prefill, tags)
    prefill.step(announced("t"))
    done = SendProgress("t", tuple(tags), PROMPT, PROMPT, "r", tuple(tags.values()))
    prefill.step(StepOrders(progress=[done], held=[Held("t", "r")]))
    if changed:
        tell(prefill, {4: 41})
    decode.step(asked("t", prefill, (7, 8, 9)))

    until((prefill, decode), lambda: decode.received == ["d-t"] and prefill.sent == {"r"})

    cause = TransferCause.STALE_TRANSFER if changed else None
    assert decode.reports["d-t"].cause is cause
    assert prefill.refused == ([IntegrityCause.STALE_TRANSFER] if changed else [])


def test_pages_are_shipped_under_the_tags_told_last_and_are_given_up_once(
    pair: tuple[Worker, Worker],
) -> None:
    """The prompt is computed in two steps; page 4, of the second, is another request's by then."""
    prefill, decode = pair
    tags = {3: 30, 4: 40, 5: 50}
    checked(prefill, tags)
    prefill.step(announced("t"))
    first = SendProgress("t", (3,), BLOCK, PROMPT, "r", (30,))
    prefill.step(StepOrders(progress=[first]))
    decode.step(asked("t", prefill, (7, 8, 9)))
    until((prefill, decode), lambda: "t" in prefill.side._courier.sender.wanted())
    tell(prefill, {4: 41})
    whole = SendProgress("t", tuple(tags), PROMPT, PROMPT, "r", tuple(tags.values()))
    orders = StepOrders(progress=[whole])
    prefill.side.after_forward(orders)
    prefill.side.after_forward(StepOrders())
    until((prefill, decode), lambda: decode.received == ["d-t"])

    assert decode.reports["d-t"].cause is TransferCause.STALE_TRANSFER
    assert prefill.refused == [IntegrityCause.STALE_TRANSFER]


def test_pages_of_an_earlier_transfer_that_changed_hands_do_not_end_a_request_that_waits_for_others(
    pair: tuple[Worker, Worker],
) -> None:
    _, decode = pair
    checked(decode, {7: 70, 8: 80})
    old = ReceiveOrder(
        "d", Ticket(transfer_id="old", role=Role.RECEIVE, peer_engine="prefill"), 0, (7,), (70,)
    )
    new = ReceiveOrder(
        "d", Ticket(transfer_id="new", role=Role.RECEIVE, peer_engine="prefill"), 0, (8,), (80,)
    )
    tell(decode, {7: 71})
    decode.side._open_receives["d"] = "new"
    finished = Finished(set(), set(), set())
    group = PageGroup(0, 1, torch.zeros(1))
    decode.side._finish_receive(decode.side._running(), Outcome(old, (group,), 0.0, None), finished)
    assert finished == Finished(set(), set(), set())
    assert decode.side.take_news().faults == {}

    tell(decode, {8: 81})
    decode.side._finish_receive(
        decode.side._running(), Outcome(new, (group,), 0.0, TransferCause.DEADLINE), finished
    )
    assert finished == Finished(set(), {"d"}, set()), "it ends, and computes nothing itself"
    assert decode.side.take_news().faults.keys() == {"d"}


def test_a_ticket_of_an_earlier_start_of_the_engine_is_refused_and_counted(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    order = asked("t", prefill, (7,)).receives[0]
    decode.step(StepOrders(receives=[replace(order, ticket=replace(order.ticket, peer_engine="earlier"))]))

    until((prefill, decode), lambda: decode.failed == {"d-t"})
    some_steps(prefill)

    assert decode.reports["d-t"].cause is TransferCause.STALE_TRANSFER
    assert prefill.refused == [IntegrityCause.STALE_TRANSFER]


def test_bytes_that_are_not_what_was_sent_are_counted_and_never_written(tmp_path: Path) -> None:
    prefill, decode = worker("prefill", tmp_path), worker("decode", tmp_path, page_faults=tmp_path)
    try:
        prefill.step(announced("t"))
        fault = TableFault(PageFaultKind.CORRUPT_PAYLOAD, "d-t", 0, 0)
        decode.step(replace(asked("t", prefill, (7, 8, 9)), spoiled=(fault,)))
        for page in (3, 4, 5):
            prefill.write(page, float(page))
        prefill.step(computed("t", (3, 4, 5), PROMPT))
        until((prefill, decode), lambda: decode.failed == {"d-t"})
    finally:
        prefill.side.close()
        decode.side.close()

    assert decode.reports["d-t"].cause is TransferCause.CHECKSUM
    assert decode.refused == [IntegrityCause.PAYLOAD_CHECKSUM]
    assert not any(decode.caches["layer0"][page].any() for page in (7, 8, 9))


def test_what_a_flagged_request_computed_is_not_shipped(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (7, 8, 9)))
    orders = StepOrders(progress=[SendProgress("t", (3, 4, 5), PROMPT, PROMPT, "r")])
    prefill.side.check.fault("r", PageFault(IntegrityCause.SHIFTED, 3, 1, 2))
    prefill.side.check_step(orders, SimpleNamespace(attn_metadata={"layer0": None}, slot_mapping={}))
    prefill.side.after_forward(orders)
    some_steps(prefill, decode)
    assert decode.received == []

    prefill.side.check.take()
    prefill.side.check_step(orders, SimpleNamespace(attn_metadata={"layer0": None}, slot_mapping={}))
    prefill.side.after_forward(orders)
    until((prefill, decode), lambda: decode.received == ["d-t"])


def test_what_was_computed_from_pages_of_a_flagged_request_is_not_shipped(
    pair: tuple[Worker, Worker],
) -> None:
    """It is found wrong before the forward, `l` has found what it was to write."""
    prefill, decode = pair
    prefill.step(announced("t"))
    decode.step(asked("t", prefill, (7, 8, 9)))
    check = CheckOrders(LedgerDelta(), {}, Rights(), leans={"l": {"r"}})
    orders = StepOrders(progress=[SendProgress("t", (3, 4, 5), PROMPT, PROMPT, "l")], check=check)
    prefill.side.check.fault("r", PageFault(IntegrityCause.SHIFTED, 3, 1, 2))
    prefill.side.check_step(orders, SimpleNamespace(attn_metadata={"layer0": None}, slot_mapping={}))
    prefill.side.after_forward(orders)
    some_steps(prefill, decode)

    assert decode.received == []


class Late(StepCheck):
    """What is wrong is known behind the step."""

    def verdict(self) -> Verdicts:
        earlier, last = Seen({"r": Sighting(0, Finding.READ, 0, 3)}), Seen({})
        return Verdicts((earlier, last))


@pytest.mark.parametrize("flagged", ["r", "l"], ids=["its own", "what it found"])
def test_what_turns_out_to_be_wrong_behind_the_step_is_not_received_and_the_next_is(
    pair: tuple[Worker, Worker], flagged: str
) -> None:
    """Of `r`, or of `l`, that found what `r` was to write; with `s` nothing is wrong."""
    prefill, decode = pair
    prefill.side.check = Late(NO_CACHE, checked=False)
    for number, (transfer_id, request_id) in enumerate((("t", flagged), ("u", "s"))):
        prefill.step(announced(transfer_id))
        decode.step(asked(transfer_id, prefill, (7 + number,)))
        prefill.write(3 + number, 1.0)
        progress = SendProgress(transfer_id, (3 + number,), BLOCK, BLOCK, request_id)
        check = CheckOrders(LedgerDelta(), {}, Rights(), leans={"l": {"r"}})
        prefill.step(StepOrders(progress=[progress], check=check))
        until((prefill, decode), lambda transfer_id=transfer_id: f"d-{transfer_id}" in decode.received)

    assert decode.failed == {"d-t"}
    assert decode.reports["d-t"].cause is TransferCause.CHECKSUM
    assert [bool(decode.caches["layer0"][page].any()) for page in (7, 8)] == [False, True]
