"""Asks the engine process for its gauges, over a ZeroMQ socket on the same machine."""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from kv_transfer.api import EngineGauges, LedgerSnapshot, Membership, desk
from workers.api import FaultKind
from workers.engine.base import EngineFault


class EngineSilent(EngineFault):
    """The engine's process did not answer in time."""

    def __init__(self, detail: str) -> None:
        super().__init__(FaultKind.ENGINE_DEAD, detail)
        self.args = (detail,)  # what the constructor takes: the exception crosses processes


class GaugeClient:
    """Questions and answers in turn; concurrent callers wait for each other."""

    def __init__(self, endpoint: str, membership: Membership, *, timeout_s: float = 5.0) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context(1)
        self._socket: zmq.asyncio.Socket | None = None
        self._turn = asyncio.Lock()
        self._decoder = msgspec.msgpack.Decoder(EngineGauges)

    async def ask(self) -> EngineGauges:
        """A snapshot.

        Raises:
            EngineSilent: no answer in time, or one that is not gauges.
        """
        answer = await self._question(desk.AskGauges())
        try:
            return self._decoder.decode(answer)
        except msgspec.DecodeError as bad:
            raise EngineSilent(f"the answer is not gauges: {bad}") from bad

    async def ledger(self) -> LedgerSnapshot:
        """What the engine's ledger knows.

        Raises:
            EngineSilent: no answer in time, or one that is not a ledger.
        """
        answer = await self._question(desk.AskLedger())
        try:
            return msgspec.msgpack.decode(answer, type=LedgerSnapshot)
        except msgspec.DecodeError as bad:
            raise EngineSilent(f"the answer is not a ledger: {bad}") from bad

    async def release(self, transfer_id: str) -> None:
        """Let go of pages that nobody will fetch.

        Raises:
            EngineSilent: no answer in time.
        """
        await self._question(desk.ReleaseTransfer(transfer_id=transfer_id))

    async def _question(self, question: desk.Question) -> bytes:
        async with self._turn:
            answered = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._exchange(desk.encode(question))
                answered = True
            except TimeoutError:
                raise EngineSilent(f"no answer within {self._timeout_s:g} s") from None
            finally:
                if not answered:
                    self._drop_socket()
        return answer

    async def _exchange(self, question: bytes) -> bytes:
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._membership.client(self._socket)
            self._socket.connect(self._endpoint)
        await self._socket.send(question)
        answer: bytes = await self._socket.recv()
        return answer

    def _drop_socket(self) -> None:
        """A REQ socket without its answer can ask nothing more."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def close(self) -> None:
        self._drop_socket()
        self._context.term()
