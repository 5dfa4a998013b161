"""vLLM's `AsyncLLM` behind our engine protocol. The engine core runs as a child process."""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec

from kv_transfer.api import (
    BYTE_WIDE,
    Contract,
    EngineGauges,
    HandoffOutcome,
    HandoffReport,
    LedgerSnapshot,
    Membership,
    PageFault,
    StartReport,
    Ticket,
    scale_file_sha256,
)
from workers.api import DecodeRequest, FaultKind, FinishReason, Phase, PrefillRequest, Sampling
from workers.engine.base import Delta, Ending, EngineFault, Prefilled
from workers.engine.gauges import GaugeClient
from workers.profile.hardware import Capability, gpu_shortcomings
from workers.profile.scales import checked_scale_file
from workers.profile.schema import ModelProfile
from workers.profile.vllm_args import Device, async_engine_args, engine_args, engine_environment

_FINISH: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_BACKEND: Final = {"cpu": "gloo", "cuda": "nccl"}

LONGEST_FOLDER: Final = 80

SHUTDOWN_S: Final = 2.0
"""Until the engine process is killed. It holds nothing that outlives it, and seldom ends by itself."""

log = logging.getLogger(__name__)


class VllmEngine:
    """One engine of one phase. Sockets of the engine lie in a folder of its own, removed at close."""

    def __init__(
        self,
        profile: ModelProfile,
        phase: Phase,
        *,
        model_dir: str,
        engine_id: str,
        host: str,
        device: Device,
        contract: Contract,
        membership: Membership,
        faults: Mapping[str, Any],
        log_file: str = "",
    ) -> None:
        """
        Args:
            model_dir: folder with safetensors and tokenizer.
            engine_id: 128 random bits in hex, fresh for every start.
            host: the address that the engine binds.
            contract: of `model_dir`.
            membership: lets the engine and its peers speak.
            faults: the connector's faults on purpose; empty outside tests.
            log_file: where the engine's process writes its part of the log; empty: to its standard error.

        Raises:
            ScaleFileError: the profile names a scale file that is not for this cache.
        """
        self._profile, self._phase, self._device = profile, phase, device
        self._environment = engine_environment(profile, phase, device, host)
        self._folder = socket_folder()
        endpoint = f"ipc://{self._folder}/gauges"
        keys = self._folder / "membership"
        membership.write(keys)
        connector: dict[str, Any] = {
            "engine_id": engine_id,
            "bind_host": host,
            "backend": _BACKEND[device],
            "gauges_endpoint": endpoint,
            "membership_file": str(keys),
            "contract": msgspec.to_builtins(contract),
            "integrity": profile.integrity,
            "faults": dict(faults),
            "log_file": log_file,
            **_cache_settings(profile, phase, device),
        }
        self._arguments = engine_args(profile, phase, model_dir, engine_id, connector, device=device)
        self._gauges = GaugeClient(endpoint, membership)
        self._llm: Any = None
        self._vocabulary = 0

    async def start(self) -> None:
        os.environ.update(self._environment)
        try:
            if self._device == "cuda":
                await asyncio.to_thread(_refuse_unfit, self._profile, self._phase)
            self._llm = await asyncio.to_thread(_load, self._arguments)
            self._vocabulary = int(self._llm.model_config.get_vocab_size())
            await self._gauges.ask()
        except EngineFault:
            await self.close()
            raise
        except Exception as bad:
            await self.close()
            raise EngineFault(FaultKind.ENGINE_DEAD, f"the engine did not start: {bad}") from bad

    async def prefill(self, request: PrefillRequest, ticket: Ticket) -> Prefilled:
        from vllm import SamplingParams

        # Sampling is decode's business: this token is discarded.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=_extra(ticket))
        cached, start = 0, None
        outputs = self._run(request.request_id, request.token_ids, request.cache_salt, params)
        async with aclosing(outputs):
            async for output in outputs:
                cached = output.num_cached_tokens or 0
                start = start or StartReport.from_params(output.kv_transfer_params)
        return Prefilled(cached_tokens=cached, start=start)

    async def decode(self, request: DecodeRequest, ticket: Ticket | None) -> AsyncGenerator[Delta, None]:
        params = _sampling(request.sampling, request.stop_token_ids, ticket)
        engine_id = f"{request.request_id}.{request.attempt}"
        outputs = self._run(engine_id, request.token_ids, request.cache_salt, params)
        async with aclosing(outputs):
            async for output in outputs:
                part = output.outputs[0]
                ending = self._ending(output, part.finish_reason) if output.finished else None
                start = StartReport.from_params(output.kv_transfer_params)
                yield Delta(token_ids=tuple(part.token_ids), start=start, ending=ending)

    async def _run(
        self, request_id: str, token_ids: tuple[int, ...], cache_salt: str, params: Any
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs; its exceptions and failed finishes as engine faults."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        # An id outside the vocabulary is an index error inside the model, which kills the engine.
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocabulary:
            raise EngineFault(FaultKind.INVALID_REQUEST, "token_ids: empty, or outside the vocabulary")
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": cache_salt}
        try:
            async with aclosing(self._llm.generate(prompt, params, request_id)) as outputs:
                async for output in outputs:
                    _raise_if_failed(output)
                    yield output
        except EngineDeadError as dead:
            raise EngineFault(FaultKind.ENGINE_DEAD, str(dead)) from dead
        except (VLLMValidationError, ValueError) as bad:
            raise EngineFault(FaultKind.INVALID_REQUEST, str(bad)) from bad

    def _ending(self, output: Any, finish: str) -> Ending:
        handoff = HandoffReport.from_params(output.kv_transfer_params)
        return Ending(
            reason=_FINISH[finish],
            cached_tokens=local_hit(output.num_cached_tokens or 0, handoff, self._profile.block_size),
            handoff=handoff,
        )

    async def release(self, transfer_id: str) -> None:
        self._check_running()
        await self._gauges.release(transfer_id)

    async def gauges(self) -> EngineGauges:
        self._check_running()
        return await self._gauges.ask()

    async def ledger(self) -> LedgerSnapshot:
        self._check_running()
        return await self._gauges.ledger()

    def _check_running(self) -> None:
        if self._llm is None or self.dead:
            raise EngineFault(FaultKind.ENGINE_DEAD, "the engine process is not running")

    @property
    def dead(self) -> bool:
        return self._llm is not None and bool(self._llm.errored)

    async def close(self) -> None:
        self._gauges.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def socket_folder() -> Path:
    """A fresh private folder for ipc sockets, whose paths hold at most 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="pg-", dir=usual if len(usual) <= LONGEST_FOLDER else "/tmp"))


def capability_here() -> Capability | None:
    """Of this process's first GPU; None: it has none."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def _refuse_unfit(
    profile: ModelProfile, phase: Phase, capability: Callable[[], Capability | None] = capability_here
) -> None:
    """Raises `EngineFault` where the GPU here cannot do what the profile asks of it."""
    if (found := capability()) is None:
        raise EngineFault(FaultKind.ENGINE_DEAD, f"{phase}: there is no NVIDIA GPU here")
    if told := list(gpu_shortcomings(profile, phase, found)):
        raise EngineFault(FaultKind.ENGINE_DEAD, "; ".join(told))


def _cache_settings(profile: ModelProfile, phase: Phase, device: Device) -> dict[str, Any]:
    part = profile.phase(phase)
    narrow = part.format in BYTE_WIDE
    settings: dict[str, Any] = {"rounded_writes": narrow and device == "cpu" and part.kv_writes == "nearest"}
    if (path := checked_scale_file(profile, phase)) is not None:
        settings |= {"scale_file": str(path), "scale_sha256": scale_file_sha256(path)}
    return settings


def _load(arguments: dict[str, Any]) -> Any:
    """Blocks for as long as the weights take to load."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(async_engine_args(arguments))


def _extra(ticket: Ticket | None) -> dict[str, Any] | None:
    return None if ticket is None else {"kv_transfer_params": ticket.to_params()}


def _sampling(sampling: Sampling, stop_token_ids: tuple[int, ...], ticket: Ticket | None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        stop_token_ids=list(stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=_extra(ticket),
    )


def _raise_if_failed(output: Any) -> None:
    reason = output.outputs[0].finish_reason
    if (fault := PageFault.from_params(output.kv_transfer_params)) is not None:
        raise EngineFault(FaultKind.PAGE_INTEGRITY, str(fault.error()), fault)
    if reason is not None and reason not in _FINISH:
        raise EngineFault(FaultKind.INTERNAL, f"the engine ended the request: {reason}")


def local_hit(cached_tokens: int, handoff: HandoffReport | None, block_size: int) -> int:
    """Prompt tokens of `cached_tokens` that lay in the engine's own cache.

    The engine counts pages that the transfer brought as cached too. Own hits are whole pages; the last page
    that came may be partly used.
    """
    if handoff is None or handoff.outcome is HandoffOutcome.NOTHING_MISSING:
        return cached_tokens
    if handoff.outcome is HandoffOutcome.RECOMPUTED:
        return 0  # the count was taken before the transfer failed and includes pages that never came
    pages = -(-cached_tokens // block_size)
    return max(0, pages - handoff.pages) * block_size
