"""The product's engine, and beside it: forced answers, a cache of any size, skewed scales."""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kv_transfer.api import HandoffReport, Ticket
from workers.engine.vllm_engine import VllmEngine
from workers.trials import forced, skewed


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    handoff: HandoffReport | None


class TrialEngine(VllmEngine):
    @property
    def id(self) -> str:
        told: str = self._arguments["kv_transfer_config"]["engine_id"]
        return told

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def fit_out(self, pages: int | None) -> None:
        """Before the start: requests may be led and scales skewed.

        Args:
            pages: for requests, whatever the memory; None: as many as it holds.
        """
        self._arguments["logits_processors"] = [f"{forced.__name__}:{forced.Forced.__name__}"]
        self._arguments["worker_extension_cls"] = f"{skewed.__name__}.{skewed.Skewed.__name__}"
        if pages is not None:
            self._arguments["num_gpu_blocks_override"] = pages + 1  # vLLM's null page

    async def skew(self, factor: float) -> int:
        """How many layers there are."""
        name = skewed.Skewed.skew_key_scales.__name__
        layers: list[int] = await self._llm.collective_rpc(name, args=(factor,))
        return layers[0]

    async def answer(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        *,
        salt: str,
        tokens: int,
        ticket: Ticket | None,
        lead: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Exactly so many tokens, greedily.

        Args:
            lead: the fields of a `forced.Lead`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, Any] = {}
        if ticket is not None:
            extra["kv_transfer_params"] = ticket.to_params()
        if lead is not None:
            extra[forced.KEY] = dict(lead)
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra or None,
        )
        found: tuple[int, ...] = ()
        handoff = None
        async with aclosing(self._run(request_id, token_ids, salt, params)) as outputs:
            async for output in outputs:
                found = tuple(output.outputs[0].token_ids)
                handoff = HandoffReport.from_params(output.kv_transfer_params)
        return Answer(found, handoff)
