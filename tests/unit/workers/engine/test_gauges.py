import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kv_transfer.api import LedgerRow, LedgerSnapshot
from tests.support.engines import some_gauges
from tests.support.members import MEMBERSHIP
from workers.api import FaultKind
from workers.engine.gauges import EngineSilent, GaugeClient


@asynccontextmanager
async def answering(endpoint: str, *answers: bytes | None) -> AsyncIterator[None]:
    """An engine process that gives these answers in turn; None is no answer."""
    context = zmq.asyncio.Context()
    gate = MEMBERSHIP.gate(context)
    socket = context.socket(zmq.ROUTER)
    MEMBERSHIP.server(socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)

    async def serve() -> None:
        for answer in answers:
            caller, empty, _ = await socket.recv_multipart()
            if answer is not None:
                await socket.send_multipart([caller, empty, answer])

    server = asyncio.create_task(serve())
    try:
        yield
    finally:
        server.cancel()
        socket.close()
        gate.stop()
        context.term()


GOOD = msgspec.msgpack.encode(some_gauges())


async def test_gauges_arrive_as_the_engine_gave_them(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/g"
    async with answering(endpoint, GOOD, GOOD):
        client = GaugeClient(endpoint, MEMBERSHIP)
        answers = await asyncio.gather(client.ask(), client.ask())
        client.close()

    assert answers == [some_gauges(), some_gauges()]


async def test_an_engine_that_misses_one_question_is_silent_and_can_answer_the_next(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/g"
    async with answering(endpoint, None, GOOD):
        client = GaugeClient(endpoint, MEMBERSHIP, timeout_s=0.2)
        with pytest.raises(EngineSilent) as caught:
            await client.ask()
        again = await client.ask()
        client.close()

    assert caught.value.kind is FaultKind.ENGINE_DEAD
    assert again == some_gauges()


async def test_a_ledger_arrives_as_the_engine_laid_it_open_or_not_at_all(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/g"
    row = LedgerRow(request_id="r", group=0, pages=(1, 2), tags=(2**62, 0))
    known = LedgerSnapshot(ledger="generation", rows=(row,))
    async with answering(endpoint, msgspec.msgpack.encode(known), GOOD):
        client = GaugeClient(endpoint, MEMBERSHIP)
        assert await client.ledger() == known
        with pytest.raises(EngineSilent, match="not a ledger"):
            await client.ledger()
        client.close()


async def test_an_answer_that_is_not_gauges_is_a_fault(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/g"
    async with answering(endpoint, b"\xc1"):
        client = GaugeClient(endpoint, MEMBERSHIP)
        with pytest.raises(EngineSilent, match="not gauges"):
            await client.ask()
        client.close()


async def test_nobody_at_the_endpoint_is_silence(tmp_path: Path) -> None:
    client = GaugeClient(f"ipc://{tmp_path}/nobody", MEMBERSHIP, timeout_s=0.05)
    with pytest.raises(EngineSilent):
        await client.ask()
    client.close()
