"""Two real engines and the real connector between them, without Ray or HTTP."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from kv_transfer.api import HandoffOutcome, HandoffReport, Role, Ticket
from tests.conftest import ANSWER_TOKENS, Texts
from tests.support.members import MEMBERSHIP
from tests.support.prompts import PAGE
from workers.api import DecodeRequest, Phase, PrefillRequest, Sampling
from workers.engine.vllm_engine import VllmEngine
from workers.profile.fingerprint import contract_of
from workers.profile.schema import parse_profile

ROOT: Final = Path(__file__).parents[2]
WRONG: Final = "f0"
"""Transfers whose id starts so get another request's pages, on purpose."""
SALT: Final = "a tenant's salt"


@dataclass
class EnginePair:
    prefill: VllmEngine
    decode: VllmEngine
    prefill_id: str
    decode_id: str
    addresses: tuple[str, ...]

    async def answer(
        self, ids: list[int], *, transfer_id: str = "", salt: str = SALT, max_tokens: int = ANSWER_TOKENS
    ) -> tuple[list[int], HandoffReport | None]:
        """One request through both engines, dispatched together."""
        transfer_id = transfer_id or "00" + secrets.token_hex(15)
        computing = asyncio.create_task(self.compute(ids, transfer_id, salt=salt))
        try:
            return await self.fetch(ids, transfer_id, salt=salt, max_tokens=max_tokens)
        finally:
            await computing

    async def compute(
        self, ids: list[int], transfer_id: str, *, salt: str = SALT, deadline_s: float = 60.0
    ) -> None:
        request = PrefillRequest(
            request_id=secrets.token_hex(16),
            transfer_id=transfer_id,
            decode_engine=self.decode_id,
            token_ids=tuple(ids),
            cache_salt=salt,
            deadline_s=deadline_s,
        )
        ticket = Ticket(
            transfer_id=transfer_id, role=Role.SEND, peer_engine=self.decode_id, deadline_s=deadline_s
        )
        await self.prefill.prefill(request, ticket)

    async def fetch(
        self,
        ids: list[int],
        transfer_id: str,
        *,
        salt: str = SALT,
        max_tokens: int = ANSWER_TOKENS,
        deadline_s: float = 60.0,
    ) -> tuple[list[int], HandoffReport | None]:
        ticket = Ticket(
            transfer_id=transfer_id,
            role=Role.RECEIVE,
            peer_engine=self.prefill_id,
            peer_addresses=self.addresses,
            deadline_s=deadline_s,
        )
        request = DecodeRequest(
            request_id=secrets.token_hex(16),
            attempt=1,
            token_ids=tuple(ids),
            cache_salt=salt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
            stop_token_ids=(2,),
            gateway_id="test",
            bus_address="",
            deadline_s=120.0,
        )
        tokens: list[int] = []
        report = None
        async for delta in self.decode.decode(request, ticket):
            tokens += delta.token_ids
            if delta.ending is not None:
                report = delta.ending.handoff
        return tokens, report

    async def first_tokens_of_shipped(self, texts: Texts, *, page_bytes: int) -> dict[int, int]:
        """The first token of each text that is longer than a page, by its length.

        Args:
            page_bytes: of one page on the wire. It is asserted that all pages of each text were shipped so.
        """
        first = {}
        for length in (length for length in texts if length > PAGE):
            tokens, report = await self.answer(texts[length][1], salt=fresh(), max_tokens=4)
            assert report is not None
            pages = -(-(length - 1) // PAGE)
            assert (report.outcome, report.pages) == (HandoffOutcome.SHIPPED, pages)
            assert report.wire_bytes == pages * page_bytes
            first[length] = tokens[0]
        return first

    async def settled(self, within_s: float = 10.0) -> bool:
        """Whether both engines hold no page, request or transfer, at once or soon."""
        for _ in range(int(within_s / 0.1)):
            gauges = [await engine.gauges() for engine in (self.prefill, self.decode)]
            if all(
                g.free_pages == g.total_pages and not g.running + g.waiting + g.in_flight_transfers
                for g in gauges
            ):
                return True
            await asyncio.sleep(0.1)
        return False


@asynccontextmanager
async def engine_pair(
    model_dir: Path, *, decode_dir: Path | None = None, **decode: Any
) -> AsyncIterator[EnginePair]:
    """Of profile `exact`, with these changes to its decode phase.

    Args:
        decode_dir: what decode loads, where that is another folder.
    """
    raw = yaml.safe_load((ROOT / "deploy/models/exact.yaml").read_text())
    raw["decode"] |= decode
    profile = parse_profile(raw, source="exact.yaml")
    folders = {Phase.PREFILL: model_dir, Phase.DECODE: decode_dir or model_dir}
    ids = {phase: secrets.token_hex(16) for phase in Phase}
    engines = {
        phase: VllmEngine(
            profile,
            phase,
            model_dir=str(folders[phase]),
            engine_id=ids[phase],
            host="127.0.0.1",
            device="cpu",
            contract=contract_of(profile, folders[phase]),
            membership=MEMBERSHIP,
            faults={"foreign_pages": True, "only_transfers": WRONG} if phase is Phase.PREFILL else {},
        )
        for phase in Phase
    }
    try:
        for engine in engines.values():
            await engine.start()
        prefill, decode_engine = engines[Phase.PREFILL], engines[Phase.DECODE]
        addresses = (await prefill.gauges()).control_addresses
        yield EnginePair(prefill, decode_engine, ids[Phase.PREFILL], ids[Phase.DECODE], addresses)
    finally:
        for engine in engines.values():
            await engine.close()


def fresh() -> str:
    """A salt that nobody has used: the prefix caches of both engines hold nothing under it."""
    return secrets.token_hex(8)
