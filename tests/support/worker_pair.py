"""Two worker halves with real couriers and a real Gloo link, fed step by step as an engine would."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_transfer.api.contract import Contract
from kv_transfer.api.handoff import HandoffReport, Role, Ticket
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.api.page import Scales, WireFormat
from kv_transfer.codec import CONVERSIONS, Conversion
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.metadata import ReceiveOrder, SendProgress, StepOrders
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.connector.worker_side import WorkerSide
from tests.support.members import membership_file

Conversions = Mapping[tuple[WireFormat, WireFormat], Conversion]
BLOCK = 4
PROMPT = 10
"""Two whole pages and a half."""
NO_CONTRACT = Contract()
NO_CACHE = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])


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


def worker(
    name: str,
    folder: Path,
    *,
    rank: int = 0,
    page_faults: Path | None = None,
    integrity: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: str = "auto",
    scales: Scales = (),
    contract: Contract = NO_CONTRACT,
    conversions: Conversions = CONVERSIONS,
) -> Worker:
    config = ConnectorConfig.parse(
        {
            "engine_id": name,
            "bind_host": "127.0.0.1",
            "backend": "gloo",
            "gauges_endpoint": f"ipc://{folder}/{name}",
            "membership_file": membership_file(folder),
            "link_timeout_s": 5.0,
            "integrity": integrity,
            "contract": msgspec.to_builtins(contract),
            "faults": {} if page_faults is None else {"page_faults": str(page_faults)},
        }
    )
    side = WorkerSide(config, rank, StepCheck(NO_CACHE, checked=False), conversions=conversions)
    caches = {f"layer{i}": torch.zeros(16, 1, BLOCK, 8, dtype=dtype) for i in range(2)}
    side.register(caches, "test", cache_dtype=cache_dtype, scales=scales)
    return Worker(side, caches)


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
