"""Two worker halves with real couriers and a real Gloo link, fed step by step as an engine would."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import zmq
from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_transfer.api import desk
from kv_transfer.api.errors import TransferCause
from kv_transfer.api.faults import PageFaultKind
from kv_transfer.api.handoff import HandoffOutcome, HandoffReport, Role, Ticket
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.gauges import GaugeServer
from kv_transfer.connector.metadata import CheckOrders, Held, ReceiveOrder, SendProgress, StepOrders
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.connector.worker_side import CourierDied, WorkerSide
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.device import Seen, Sighting
from kv_transfer.integrity.prestep import Rights
from kv_transfer.integrity.verify import Finding
from kv_transfer.testing.table_faults import TableFault
from tests.support.members import MEMBERSHIP, membership_file
from tests.support.real_scheduler import cache_config

BLOCK = 4
PROMPT = 10
NO_CACHE = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])
ONE_GROUP = cache_config(20)
"""Two whole pages and a half."""


@dataclass
class Worker:
    """One worker half, its caches, and everything that it has reported."""

    side: WorkerSide
    caches: dict[str, torch.Tensor]
    sent: set[str] = field(default_factory=set)
    received: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    reports: dict[str, HandoffReport] = field(default_factory=dict)
    faults: dict[str, PageFault] = field(default_factory=dict)
    refused: list[IntegrityCause] = field(default_factory=list)

    def step(self, orders: StepOrders | None = None) -> None:
        orders = orders or StepOrders()
        self.side.begin_step(orders)
        self.side.after_forward(orders)
        finished = self.side.finish_step(idle=True)
        self.sent |= finished.sending
        self.received += sorted(finished.receiving)
        self.failed |= finished.failed
        news = self.side.take_news()
        self.reports |= news.reports
        self.faults |= news.faults
        self.refused += news.refused

    def write(self, page: int, value: float) -> None:
        for layer, cache in enumerate(self.caches.values()):
            cache[page] = value + layer / 2


def worker(name: str, folder: Path, *, rank: int = 0, page_faults: Path | None = None) -> Worker:
    config = ConnectorConfig.parse(
        {
            "engine_id": name,
            "bind_host": "127.0.0.1",
            "backend": "gloo",
            "gauges_endpoint": f"ipc://{folder}/{name}",
            "membership_file": membership_file(folder),
            "link_timeout_s": 5.0,
            "faults": {} if page_faults is None else {"page_faults": str(page_faults)},
        }
    )
    side = WorkerSide(config, rank, StepCheck(NO_CACHE, checked=False))
    caches = {f"layer{i}": torch.zeros(16, 1, BLOCK, 8) for i in range(2)}
    side.register(caches, "test")
    return Worker(side, caches)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    prefill, decode = worker("prefill", tmp_path), worker("decode", tmp_path)
    yield prefill, decode
    prefill.side.close()
    decode.side.close()


def announced(transfer_id: str) -> StepOrders:
    return StepOrders(announces=[Ticket(transfer_id=transfer_id, role=Role.SEND, peer_engine="decode")])


def asked(transfer_id: str, prefill: Worker, page_ids: tuple[int, ...], *, first_page: int = 0) -> StepOrders:
    ticket = Ticket(
        transfer_id=transfer_id,
        role=Role.RECEIVE,
        peer_engine="prefill",
        peer_addresses=(prefill.side.address().control,),
        deadline_s=10.0,
    )
    return StepOrders(receives=[ReceiveOrder(f"d-{transfer_id}", ticket, first_page, page_ids)])


def computed(transfer_id: str, page_ids: tuple[int, ...], tokens: int) -> StepOrders:
    return StepOrders(progress=[SendProgress(transfer_id, page_ids, tokens, PROMPT)])


def until(workers: tuple[Worker, ...], done: object, *, within_s: float = 10.0) -> None:
    """Empty steps, as an engine makes while requests only wait."""
    end = time.monotonic() + within_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, "not in time"
        for each in workers:
            each.step()


def some_steps(*workers: Worker) -> None:
    for _ in range(100):
        for each in workers:
            each.step()


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


@pytest.mark.parametrize("changed", [False, True], ids=["as ordered", "changed hands"])
def test_pages_are_written_only_while_they_have_the_tags_of_the_order(
    pair: tuple[Worker, Worker], changed: bool
) -> None:
    """Pages 7, 8 and 9 are ordered; page 8 is another request's by the time that bytes come."""
    prefill, decode = pair
    decode.side.check = StepCheck(ONE_GROUP, checked=True)
    tags = {7: 70, 8: 80, 9: 90}
    decode.side.check.before_step(CheckOrders(LedgerDelta(tags=dict(tags)), {}, Rights()), [], [])
    prefill.step(announced("t"))
    order = replace(asked("t", prefill, tuple(tags)).receives[0], tags=tuple(tags.values()))
    decode.step(StepOrders(receives=[order]))
    if changed:
        decode.side.check.before_step(CheckOrders(LedgerDelta(tags={8: 81}), {}, Rights()), [], [])
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
    prefill.side.check = StepCheck(ONE_GROUP, checked=True)
    tags = {3: 30, 4: 40, 5: 50}
    prefill.side.check.before_step(CheckOrders(LedgerDelta(tags=dict(tags)), {}, Rights()), [], [])
    prefill.step(announced("t"))
    done = SendProgress("t", tuple(tags), PROMPT, PROMPT, "r", tuple(tags.values()))
    prefill.step(StepOrders(progress=[done], held=[Held("t", "r")]))
    if changed:
        prefill.side.check.before_step(CheckOrders(LedgerDelta(tags={4: 41}), {}, Rights()), [], [])
    decode.step(asked("t", prefill, (7, 8, 9)))

    until((prefill, decode), lambda: decode.received == ["d-t"] and prefill.sent == {"r"})

    cause = TransferCause.STALE_TRANSFER if changed else None
    assert decode.reports["d-t"].cause is cause
    assert prefill.refused == ([IntegrityCause.STALE_TRANSFER] if changed else [])


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


class Late(StepCheck):
    """What is wrong is known behind the step."""

    def verdict(self) -> Seen:
        return Seen({"r": Sighting(0, Finding.READ, 0, 3)})


def test_what_turns_out_to_be_wrong_behind_the_step_is_not_received_and_the_next_is(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    prefill.side.check = Late(NO_CACHE, checked=False)
    for number, (transfer_id, request_id) in enumerate((("t", "r"), ("u", "s"))):
        prefill.step(announced(transfer_id))
        decode.step(asked(transfer_id, prefill, (7 + number,)))
        prefill.write(3 + number, 1.0)
        progress = SendProgress(transfer_id, (3 + number,), BLOCK, BLOCK, request_id)
        prefill.step(StepOrders(progress=[progress]))
        until((prefill, decode), lambda transfer_id=transfer_id: f"d-{transfer_id}" in decode.received)

    assert decode.failed == {"d-t"}
    assert decode.reports["d-t"].cause is TransferCause.CHECKSUM
    assert [bool(decode.caches["layer0"][page].any()) for page in (7, 8)] == [False, True]


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
