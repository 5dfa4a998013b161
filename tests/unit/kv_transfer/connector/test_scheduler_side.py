"""What the scheduler half decides, told by requests as vLLM shows them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kv_transfer.api import LEDGER_CHECKS, NOTHING_CHECKED, TABLE_CHECKS, Coverage, LedgerSnapshot, desk
from kv_transfer.api.gauges import EngineGauges
from kv_transfer.api.handoff import HandoffOutcome, HandoffReport, Role, Ticket
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.metadata import WorkerNews
from kv_transfer.connector.scheduler_side import SchedulerSide
from kv_transfer.integrity.ledger import GenerationLedger
from tests.support.members import MEMBERSHIP, membership_file
from tests.support.real_scheduler import BLOCK as PAGE
from tests.support.real_scheduler import a_request, cache_config, engine_config, hasher, scheduler_of

T = TypeVar("T")
BLOCK = 4
DONE, ABORTED = RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/gauges"


@pytest.fixture
def side(endpoint: str, tmp_path: Path) -> Iterator[SchedulerSide]:
    side = SchedulerSide(config_of(endpoint, tmp_path), BLOCK, tables=True)
    yield side
    side.close()


def config_of(endpoint: str, folder: Path, **changes: Any) -> ConnectorConfig:
    usual = {
        "engine_id": "e",
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": endpoint,
        "membership_file": membership_file(folder),
    }
    return ConnectorConfig.parse(usual | changes)


def request(role: Role, tokens: int, *, name: str = "r") -> Any:
    ticket = Ticket(transfer_id=f"t-{name}", role=role, peer_engine="peer", peer_addresses=("tcp://peer",))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=ticket.to_params(),
        num_prompt_tokens=tokens,
        status=RequestStatus.RUNNING,
    )


def blocks(*page_ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(page_ids),))


def a_step(**scheduled: tuple[int, int, tuple[int, ...]]) -> Any:
    """A step of requests: name -> (tokens computed before, tokens scheduled, pages)."""
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (before, _, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={name: count for name, (_, count, _) in scheduled.items()},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (list(scheduled[name][2]),)),
    )


def finish(side: SchedulerSide, asked: Any, status: RequestStatus) -> tuple[bool, dict[str, Any] | None]:
    asked.status = status
    return side.finished(asked)


@pytest.mark.parametrize(
    ("tokens", "hit", "missing", "first_page", "pages"),
    [
        (1, 0, 0, 0, ()),
        (2, 0, 1, 0, (10,)),
        (4, 0, 3, 0, (10,)),
        (5, 0, 4, 0, (10,)),
        (6, 0, 5, 0, (10, 11)),
        (8, 0, 7, 0, (10, 11)),
        (9, 0, 8, 0, (10, 11)),
        (9, 4, 4, 1, (11,)),
        (9, 8, 0, 0, ()),
        (12, 8, 3, 2, (12,)),
    ],
)
def test_decode_asks_for_exactly_the_pages_between_its_own_hit_and_the_last_token(
    side: SchedulerSide, tokens: int, hit: int, missing: int, first_page: int, pages: tuple[int, ...]
) -> None:
    asked = request(Role.RECEIVE, tokens)
    side.on_new_request(asked)

    assert side.matched_tokens(asked, hit) == (missing, missing > 0)
    side.after_alloc(asked, blocks(10, 11, 12, 13), missing)
    orders = side.build_orders(a_step())

    assert [(o.first_page, o.page_ids) for o in orders.receives] == ([(first_page, pages)] if pages else [])
    assert len(orders.declines) == (0 if pages else 1)


def test_a_request_asks_once_also_when_it_is_preempted_later(side: SchedulerSide) -> None:
    asked = request(Role.RECEIVE, 9)
    side.on_new_request(asked)
    side.after_alloc(asked, blocks(10, 11, 12), 8)
    side.build_orders(a_step())

    side.after_alloc(asked, blocks(10, 11, 12), 0)  # vLLM calls again when the pages have come

    assert side.matched_tokens(asked, 0) == (0, False)
    assert side.build_orders(a_step()).empty()


def test_a_request_that_goes_away_tells_the_worker_what_to_undo(side: SchedulerSide) -> None:
    early, late = request(Role.RECEIVE, 9, name="early"), request(Role.RECEIVE, 9, name="late")
    for asked in (early, late):
        side.on_new_request(asked)
    side.after_alloc(late, blocks(10, 11, 12), 8)

    assert finish(side, early, ABORTED) == (False, None)
    assert finish(side, late, ABORTED) == (False, None)
    orders = side.build_orders(a_step())

    assert [ticket.transfer_id for ticket in orders.declines] == ["t-early"]
    assert orders.cancels == ["t-late"]


def test_the_workers_report_leaves_with_the_answer(side: SchedulerSide) -> None:
    asked = request(Role.RECEIVE, 9)
    side.on_new_request(asked)
    side.after_alloc(asked, blocks(10, 11, 12), 8)
    report = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=2, wire_bytes=64, seconds=0.5)
    side.on_news(WorkerNews({"r": report, "unknown": report}))

    held, params = finish(side, asked, DONE)

    assert held is False
    assert HandoffReport.from_params(params) == report
    assert side.build_orders(a_step()).cancels == []


def test_prefill_tells_how_far_each_announced_request_is_written_after_the_step(side: SchedulerSide) -> None:
    side.on_new_request(request(Role.SEND, 20))
    side.on_new_request(SimpleNamespace(request_id="plain", kv_transfer_params=None))

    orders = side.build_orders(a_step(r=(0, 17, (5, 6, 7, 8, 9)), plain=(0, 3, (1,))))

    assert [ticket.transfer_id for ticket in orders.announces] == ["t-r"]
    (progress,) = orders.progress
    assert (progress.transfer_id, progress.computed_tokens, progress.prompt_tokens) == ("t-r", 17, 20)
    assert progress.page_ids == (5, 6, 7, 8, 9)


@pytest.mark.parametrize(("status", "held"), [(DONE, True), (ABORTED, False)])
def test_only_complete_pages_are_held_for_the_peer(
    side: SchedulerSide, status: RequestStatus, held: bool
) -> None:
    asked = request(Role.SEND, 9)
    side.on_new_request(asked)
    side.build_orders(a_step())

    assert finish(side, asked, status) == (held, None)
    orders = side.build_orders(a_step())

    assert [h.request_id for h in orders.held] == (["r"] if held else [])
    assert orders.dropped == ([] if held else ["t-r"])


def test_a_preempted_prefill_request_is_suspended(side: SchedulerSide) -> None:
    side.on_new_request(request(Role.SEND, 9))
    step = a_step()
    step.preempted_req_ids = {"r", "another"}

    assert side.build_orders(step).suspended == ["t-r"]


def test_pages_are_ordered_and_shipped_with_the_tags_under_which_they_were_given(
    side: SchedulerSide, tmp_path: Path
) -> None:
    """Without tags both ends would compare nothing."""
    scheduler = scheduler_of(Scheduler, engine_config(tmp_path), cache_config(9, (None,)))
    side.bind_manager(scheduler.kv_cache_manager)
    scheduler.add_request(a_request("sends", [1] * (PAGE + 1), 4, "salt", hasher()))
    scheduler.schedule()
    ledger = side.guard.ledger
    pages = tuple(scheduler.kv_cache_manager.get_block_ids("sends")[0])
    sends, receives = request(Role.SEND, PAGE + 1, name="sends"), request(Role.RECEIVE, 9, name="receives")
    for asked in (sends, receives):
        side.on_new_request(asked)
    side.after_alloc(receives, blocks(5, 6), 8)
    orders = side.build_orders(a_step(sends=(0, PAGE + 1, pages)))

    assert len(pages) == 2
    assert [told.tags for told in orders.progress] == [ledger.tags(pages)]
    assert [order.tags for order in orders.receives] == [ledger.tags((5, 6))]


def test_gauges_are_answered_while_the_engine_does_nothing(side: SchedulerSide, endpoint: str) -> None:
    side.bind_pool(SimpleNamespace(get_num_free_blocks=lambda: 7, num_gpu_blocks=10))
    side.bind_counts(lambda: (2, 3, 5))
    gauges = asked(endpoint)

    assert (gauges.free_pages, gauges.total_pages, gauges.running, gauges.waiting) == (7, 9, 2, 3)


@pytest.mark.parametrize(
    ("change", "tables", "coverage"),
    [
        ({}, True, Coverage(ledger="generation", checked=LEDGER_CHECKS + TABLE_CHECKS, unchecked=())),
        ({}, False, Coverage(ledger="generation", checked=LEDGER_CHECKS, unchecked=TABLE_CHECKS)),
        ({"integrity": False}, False, NOTHING_CHECKED),
    ],
)
def test_gauges_tell_what_of_the_pages_is_checked(
    change: dict[str, Any], tables: bool, coverage: Coverage, endpoint: str, tmp_path: Path
) -> None:
    scheduler = scheduler_of(Scheduler, engine_config(tmp_path), cache_config(9, (None,)))
    side = SchedulerSide(config_of(endpoint, tmp_path, **change), BLOCK, tables=tables)
    try:
        assert asked(endpoint).coverage == NOTHING_CHECKED, "nobody watches the pages yet"
        side.bind_manager(scheduler.kv_cache_manager)
        assert isinstance(side.guard.ledger, GenerationLedger) == ("integrity" not in change)
        assert asked(endpoint).coverage == coverage
    finally:
        side.close()


def test_the_desk_lays_the_ledger_open(endpoint: str, tmp_path: Path) -> None:
    scheduler = scheduler_of(Scheduler, engine_config(tmp_path), cache_config(9, (None,)))
    side = SchedulerSide(config_of(endpoint, tmp_path), BLOCK, tables=True)
    try:
        assert told(endpoint, desk.AskLedger(), LedgerSnapshot) == LedgerSnapshot(ledger="null")
        side.bind_manager(scheduler.kv_cache_manager)
        scheduler.add_request(a_request("r", [1] * (PAGE + 1), 4, "salt", hasher()))
        scheduler.schedule()
        found = told(endpoint, desk.AskLedger(), LedgerSnapshot)
    finally:
        side.close()

    (row,) = found.rows
    assert (found.ledger, row.request_id, row.group, len(row.pages)) == ("generation", "r", 0, 2)
    assert [(page.page, page.tag, page.owners, page.writer) for page in found.pages] == sorted(
        (page, tag, ("r",), "r") for page, tag in zip(row.pages, row.tags, strict=True)
    )
    assert "salt" not in str(found)


def asked(endpoint: str) -> EngineGauges:
    return told(endpoint, desk.AskGauges(), EngineGauges)


def told(endpoint: str, question: desk.Question, kind: type[T]) -> T:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        MEMBERSHIP.client(socket)
        socket.connect(endpoint)
        socket.send(desk.encode(question))
        assert socket.poll(5000)
        return msgspec.msgpack.decode(socket.recv(), type=kind)
