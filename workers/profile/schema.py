"""The model profile: one YAML mapping, validated whole before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from annotated_types import Ge, Gt, Le, MinLen, MultipleOf
from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic.types import Strict

from kv_transfer.api import BYTE_WIDE, CONVERTIBLE, ELEMENT_BYTES, WireFormat
from workers.api import Phase
from workers.profile.geometry import Geometry

Dtype = Literal["bfloat16", "float32", "float16"]
KvFormat = Literal["bf16", "fp32", "fp16", "fp8_e4m3", "fp8_e5m2"]
WeightFormat = Literal["native", "bf16", "fp32", "fp8", "int4", "nvfp4"]
GpuName = Literal["h100", "h200", "b200"]
Count = Annotated[int, Strict(), Ge(1)]
Fraction = Annotated[float, Gt(0), Le(1)]
Milliseconds = Annotated[float, Ge(0), Le(60_000)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
ParserName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]
ModelId = Annotated[
    str, StringConstraints(pattern=r"^@?[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")
]

EMBEDDED_SCALES: Final = "embedded:"
"""Before the name of a scale file that comes with us."""
_FORBID: Final = {"extra": "forbid"}
_SCALES: Final = rf"^([/~]|{EMBEDDED_SCALES}[a-z0-9][a-z0-9.-]*$)"
_FORMAT_OF: Final[Mapping[Dtype, KvFormat]] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


class ProfileError(ValueError):
    """The profile describes no model we can start. The message names every bad key by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the weights lie: exactly one of the two."""

    __pydantic_config__: ClassVar = _FORBID

    embedded: Literal["smollm2-135m"] | None = None
    """A model that an installed package brings along."""
    path: Annotated[str, MinLen(1)] | None = None
    """A folder with safetensors, tokenizer and configuration."""

    def __post_init__(self) -> None:
        if (self.embedded is None) == (self.path is None):
            raise ValueError("give exactly one of `embedded` and `path`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the scripted engine of one phase behaves: its cache, and how long a step takes.

    A step takes `base_ms`, and what each request in it and each prompt token in it add.
    """

    __pydantic_config__: ClassVar = _FORBID

    pages: Count = 2048
    """Size of the cache, in pages."""
    base_ms: Milliseconds = 20.0
    per_sequence_ms: Milliseconds = 0.0
    per_prefill_token_ms: Milliseconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """One engine of one phase, and how many of them."""

    __pydantic_config__: ClassVar = _FORBID

    replicas: Count = 1
    gpu: GpuName | None = None
    """What it is meant for; None: a CPU. Formats are checked against it, and plans made for it."""
    weights: Weights | None = None
    """Of this phase alone, e.g. in a narrower format; None: the model's."""
    weight_format: WeightFormat = "native"
    """What the weights' folder must hold; `native`: whatever it holds."""
    dtype: Dtype = "bfloat16"
    """Of the computation, and of what has no format of its own."""
    kv_format: KvFormat | None = None
    """Format of the cache; None: that of `dtype`. Decode may have a narrower one: pages are converted."""
    kv_scales: Annotated[str, StringConstraints(pattern=_SCALES)] | None = None
    """Scale file of an FP8 cache, by its full path; `phasegate calibrate` writes it. `embedded:NAME`: that of
    a model that comes with us. None: the checkpoint's scales, or 1."""
    kv_writes: Literal["nearest", "stock"] = "nearest"
    """How an engine on CPU writes to an FP8 cache: `nearest` rounds; `stock` is vLLM's kernel, which cuts
    off."""
    cache_gib: Count | None = None
    """Memory for cache pages, in GiB, on each GPU; None: 1, or what `memory_fraction` leaves."""
    memory_fraction: Fraction | None = None
    """Of a GPU's memory, for weights, pages and all else of the engine. Not with `cache_gib`."""
    max_batched_tokens: Count | None = None
    """Prompt tokens computed in one step; None: the engine's usual for its phase."""
    max_sequences: Count = 16
    """Requests computed in one step."""
    tensor_parallel: Count = 1
    """GPUs of one engine."""
    threads: Count = 1
    """CPU threads of one engine. With more than the machine has cores for, throughput collapses."""
    script: Script | None = None
    """Of the scripted engine alone."""

    def __post_init__(self) -> None:
        if self.cache_gib is not None and self.memory_fraction is not None:
            raise ValueError("give one of `cache_gib` and `memory_fraction`, not both")
        if self.gpu is None and (self.memory_fraction is not None or self.tensor_parallel > 1):
            raise ValueError("`memory_fraction` and `tensor_parallel` are of GPUs: name the `gpu`")
        own = _FORMAT_OF[self.dtype]
        if self.format != own and self.format not in BYTE_WIDE:
            raise ValueError(
                f"kv_format {self.format} differs from {own}, the format of dtype {self.dtype}: "
                "an engine cannot convert its own cache"
            )
        if self.kv_scales is not None and self.format not in BYTE_WIDE:
            raise ValueError(f"kv_scales: a cache in {self.format} has no scales")

    @property
    def cache_size_gib(self) -> int | None:
        """Memory for cache pages on each device; None: what `memory_fraction` leaves."""
        return None if self.memory_fraction is not None else self.cache_gib or 1

    @property
    def format(self) -> WireFormat:
        """Format of this engine's cache pages."""
        return WireFormat(self.kv_format or _FORMAT_OF[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model as this system serves it. `name`, `model_id`, `weights` and `context_length` are enough."""

    __pydantic_config__: ClassVar = _FORBID

    name: Name
    model_id: ModelId
    """What clients ask for, e.g. `@cf/huggingfacetb/smollm2-135m-instruct`."""
    weights: Weights
    context_length: Annotated[int, Strict(), Ge(64)]
    """Tokens of prompt and answer together."""
    aliases: tuple[ModelId, ...] = ()
    """Other names of the same model."""
    fallback: Name | None = None
    """Name of the profile that is used instead where the processor cannot do a format of this one's caches.
    It has the same `model_id` and `aliases`, and no `fallback` itself. None: such a start is refused."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """`scripted` computes nothing: its answers are made up, its pages and pace are real. Mode dev only."""
    source_revision: str | None = None
    """Where the weights come from: engines must agree on it, unless the folder records it itself."""
    block_size: Annotated[int, Strict(), Ge(16), MultipleOf(16)] = 32
    """Token slots in a cache page, on both sides."""
    integrity: Annotated[bool, Strict()] = True
    """Whether pages of the cache have tags, checked before each step: a wrong page ends its request."""
    tool_parser: ParserName | None = None
    """One of vLLM's. Gateways do not use it yet: a profile with one is planned and dry-run, not served."""
    reasoning_parser: ParserName | None = None
    """As `tool_parser`."""
    geometry: Geometry | None = None
    """Sizes, for a plan."""
    prefill: PhaseProfile = PhaseProfile()
    decode: PhaseProfile = PhaseProfile()
    dense: PhaseProfile | None = None
    """A second pool of decode engines, with a denser cache and decode's weights; None: there is none. New
    requests go there while `decode` could hardly hold all that is being answered."""
    dense_above: Fraction = 0.8
    """When requests hold so many pages in both pools, as a share of `decode`'s, new ones go to `dense`."""
    dense_below: Fraction = 0.6
    """At no more than so many they come back; what is in between changes nothing."""

    def __post_init__(self) -> None:
        have, wanted = self.prefill.format, self.decode.format
        if have != wanted and wanted not in CONVERTIBLE.get(have, ()):
            raise ValueError(
                f"prefill caches {have}, decode caches {wanted}: there is no conversion of the one into the "
                "other, which must be narrower; make dtype and kv_format equal on both sides"
            )
        if self.model_id in self.aliases or len(set(self.aliases)) != len(self.aliases):
            raise ValueError("aliases: every name of a model is given once")
        for phase in Phase:
            self._check_weights(phase)
            self._check_script(phase, self.phase(phase).script)
        if self.dense is not None:
            self._check_dense(self.dense)

    def _check_weights(self, phase: Phase) -> None:
        held = self.phase(phase).weight_format
        if self.weights_of(phase).embedded is not None and held not in ("native", "bf16"):
            raise ValueError(f"{phase}.weight_format: embedded weights are bf16, not {held}")

    def _check_script(self, phase: Phase, script: Script | None) -> None:
        if script is None:
            return
        if self.engine != "scripted":
            raise ValueError(f"{phase}.script is for engine scripted, not {self.engine}")
        if script.pages * self.block_size < self.context_length:
            raise ValueError(
                f"{phase}.script.pages: {script.pages} pages of {self.block_size} tokens hold less than one "
                f"request of context_length {self.context_length}"
            )

    def _check_dense(self, dense: PhaseProfile) -> None:
        if ELEMENT_BYTES[dense.format] >= ELEMENT_BYTES[self.decode.format]:
            raise ValueError(
                f"dense.kv_format: {dense.format} is not denser than decode's {self.decode.format}"
            )
        if dense.weights is not None or dense.weight_format != "native":
            raise ValueError("dense: weights are decode's; leave weights and weight_format out")
        if self.dense_below >= self.dense_above:
            raise ValueError(
                f"dense_below {self.dense_below} must be less than dense_above {self.dense_above}"
            )
        try:
            replace(self, decode=dense, dense=None)  # checked as the decode pool that it is
        except ValueError as bad:
            raise ValueError(str(bad).replace("decode", "dense")) from None

    @property
    def densest(self) -> "ModelProfile":
        """As the engines of `dense` see it: decode is theirs. Without such a pool: this profile."""
        if self.dense is None:
            return self
        weights, held = self.decode.weights, self.decode.weight_format
        theirs = replace(self.dense, weights=weights, weight_format=held)
        return replace(self, decode=theirs, dense=None)

    def pools(self) -> Iterator[tuple[str, "ModelProfile", Phase]]:
        """Every kind of engine: its key in this profile, the profile as it sees it, and its phase in that."""
        yield from ((phase.value, self, phase) for phase in Phase)
        if self.dense is not None:
            yield "dense", self.densest, Phase.DECODE

    def phase(self, phase: Phase) -> PhaseProfile:
        return self.prefill if phase is Phase.PREFILL else self.decode

    @property
    def sparse(self) -> bool:
        """Whether attention reads what an indexer chooses."""
        return self.geometry is not None and self.geometry.indexer is not None

    def weights_of(self, phase: Phase) -> Weights:
        return self.phase(phase).weights or self.weights


_adapter: Final = TypeAdapter(ModelProfile)


def parse_profile(raw: object, *, source: str) -> ModelProfile:
    """The profile in `raw`, a mapping as YAML or a replica's configuration gives it.

    Raises:
        ProfileError: with one line per mistake, each naming the key's path.
    """
    try:
        return _adapter.validate_python(raw)
    except ValidationError as bad:
        lines = [_line(error["loc"], error["msg"]) for error in bad.errors()]
        raise ProfileError(f"{source}:\n  " + "\n  ".join(lines)) from None


def dump_profile(profile: ModelProfile) -> dict[str, Any]:
    """The mapping of primitives that `parse_profile` turns back into `profile`."""
    dumped: dict[str, Any] = _adapter.dump_python(profile, mode="json")
    return dumped


def _line(path: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, path)) or 'profile'}: {message.removeprefix('Value error, ')}"
