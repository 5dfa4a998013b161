"""How much a model's engines hold and how fast they can decode at most, from its profile: arithmetic, no run.

docs/planning.md says what is assumed, and which published figures it reproduces.
"""

import argparse
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import yaml

from load.geometry import BYTES, Geometry, Part, parse_geometry
from load.gpus import GPUS, Gpu
from load.manifest import ROOT, manifest

MODELS: Final = ROOT / "deploy" / "models"
GIB: Final = 1 << 30

RESERVE_GIB: Final = 4.0
"""Of what an engine may take of a GPU, neither weights nor pages: activations of one step, CUDA graphs,
communicators, the context of CUDA. An assumption, one for all models: none of them has been run by us."""

BYTES_PER_WEIGHT: Final[Mapping[str, float]] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    # A float32 scale for each block of 128 x 128: `weight_block_size` of zai-org/GLM-5-FP8, config.json.
    "fp8": 1 + 4 / (128 * 128),
    # A BF16 scale for each 32 weights: `group_size` of moonshotai/Kimi-K2.6, config.json.
    "int4": 0.5 + 2 / 32,
    # An E4M3 scale for each 16 weights: NVIDIA's format.
    "nvfp4": 0.5 + 1 / 16,
}
FOUR_BITS: Final = frozenset({"int4", "nvfp4"})
"""Where a model has routed experts, these alone are quantised: so in moonshotai/Kimi-K2.6 and
nvidia/GLM-5.2-NVFP4."""

DTYPE: Final[Mapping[str, str]] = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": tuple(DTYPE),
    "weight_format": ("native", *BYTES_PER_WEIGHT),
    "kv_format": tuple(BYTES),
    "gpu": tuple(GPUS),
}


class PlanError(ValueError):
    """No plan can be made of this profile; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the plan needs of one phase of a profile, with the profile's defaults."""

    dtype: str = "bfloat16"
    weight_format: str = "native"
    kv_format: str | None = None
    gpu: str | None = None
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    cache_gib: int | None = None
    max_sequences: int = 16

    @property
    def weights(self) -> str:
        return DTYPE[self.dtype] if self.weight_format == "native" else self.weight_format

    @property
    def cache(self) -> str:
        return self.kv_format or DTYPE[self.dtype]

    def bytes_of(self, part: Part, geometry: Geometry) -> float:
        """Of the part's weights, in all."""
        plain = part.kind == "other" or (
            self.weights in FOUR_BITS and geometry.experts is not None and part.kind != "expert"
        )
        return part.parameters * BYTES_PER_WEIGHT[DTYPE[self.dtype] if plain else self.weights]

    def bytes_on_each(self, part: Part, geometry: Geometry) -> float:
        """Of the part's weights, on each of the engine's GPUs."""
        return self.bytes_of(part, geometry) / (1 if part.replicated else self.tensor_parallel)


def engine_of(raw: Mapping[str, Any], gpu: str | None = None) -> Engine:
    """From one phase of a profile as YAML has it.

    Args:
        gpu: instead of the one that the profile names; engines without a GPU keep none.

    Raises:
        PlanError: something in it is not known here.
    """
    known = {field.name: raw[field.name] for field in fields(Engine) if raw.get(field.name) is not None}
    if gpu is not None and "gpu" in known:
        known["gpu"] = gpu
    for name, among in _KNOWN.items():
        if name in known and known[name] not in among:
            raise PlanError(f"{name}: {known[name]!r} is none of {', '.join(among)}")
    return Engine(**known)


def weights_bytes(engine: Engine, geometry: Geometry) -> tuple[float, float]:
    """In all, and on each GPU."""
    parts = list(geometry.parts())
    total = sum(engine.bytes_of(part, geometry) for part in parts)
    return total, sum(engine.bytes_on_each(part, geometry) for part in parts)


def tokens_held(engine: Engine, geometry: Geometry, kv_format: str, block_size: int) -> int:
    """What the engine's cache holds, in whole pages.

    Raises:
        PlanError: the engine takes a fraction of a GPU that it does not name.
    """
    page = geometry.bytes_per_token(kv_format, engine.tensor_parallel) * block_size
    if engine.memory_fraction is None:
        room: float = (engine.cache_gib or 1) * GIB
    elif engine.gpu is None:
        raise PlanError("memory_fraction: of which GPU? Give `gpu` in the profile, or --gpu")
    else:
        share = engine.memory_fraction * GPUS[engine.gpu].memory_gib - RESERVE_GIB
        room = share * GIB - weights_bytes(engine, geometry)[1]
    return max(0, int(room // page)) * block_size


def step_bytes(engine: Engine, geometry: Geometry, kv_format: str, batch: int, context: int) -> float:
    """What each GPU reads of its memory to decode one token for each of `batch` requests.

    Of the routed experts those that the batch needs, when each request's tokens choose theirs by chance.
    """
    touched = 1.0
    if (experts := geometry.experts) is not None:
        touched -= (1 - experts.num_experts_per_tok / experts.n_routed_experts) ** batch
    weights = sum(
        engine.bytes_on_each(part, geometry) * (touched if part.kind == "expert" else 1.0)
        for part in geometry.parts()
        if part.read
    )
    return weights + batch * geometry.bytes_read(kv_format, engine.tensor_parallel, context)


def decode_bound(step: float, batch: int, gpu: Gpu) -> float:
    """Tokens a second of one engine if memory were read at full speed and nothing else took time."""
    return batch * gpu.bandwidth_gb_s * 1e9 / step


def row(
    name: str,
    phase: str,
    engine: Engine,
    geometry: Geometry,
    *,
    kv_format: str,
    block_size: int,
    context: int,
) -> dict[str, Any]:
    """One line of the plan. Bytes of cache are those on each GPU."""
    total, each = weights_bytes(engine, geometry)
    per_token = geometry.bytes_per_token(kv_format, engine.tensor_parallel)
    tokens = tokens_held(engine, geometry, kv_format, block_size)
    batch = min(engine.max_sequences, tokens // context)
    bound = None
    if phase != "prefill" and engine.gpu is not None and batch:
        step = step_bytes(engine, geometry, kv_format, batch, context)
        bound = round(decode_bound(step, batch, GPUS[engine.gpu]))
    return {
        "model": name,
        "phase": phase,
        "gpu": engine.gpu,
        "gpus": engine.tensor_parallel,
        "weight_format": engine.weights,
        "kv_format": kv_format,
        "configured": kv_format == engine.cache,
        "weights_gb_total": round(total / GIB, 2),
        "weights_gb_per_gpu": round(each / GIB, 2),
        "bytes_per_token": per_token,
        "page_bytes": per_token * block_size,
        "tokens": tokens,
        "batch": batch,
        "decode_tok_s_bound": bound,
    }


def rows_of(profile: Mapping[str, Any], *, context: int, gpu: str | None = None) -> list[dict[str, Any]]:
    """A profile's phases, each with the cache in the format of its type, in FP8, and in its own.

    Args:
        context: tokens of each request while it is decoded, for the bound.

    Raises:
        PlanError, GeometryError: of this profile no plan can be made.
    """
    name, block_size = profile["name"], profile.get("block_size", 32)
    if profile.get("engine") == "scripted":
        raise PlanError(f"{name}: its engines compute nothing")
    if profile.get("geometry") is None:
        raise PlanError(f"{name}: the profile has no `geometry`, so its size is not known")
    geometry = parse_geometry(profile["geometry"], source=name)
    found = []
    for phase in ("prefill", "decode", *(["dense"] if profile.get("dense") else ())):
        engine = engine_of(profile.get(phase) or {}, gpu)
        for kv_format in dict.fromkeys((DTYPE[engine.dtype], "fp8_e4m3", engine.cache)):
            found.append(
                row(
                    name, phase, engine, geometry, kv_format=kv_format, block_size=block_size, context=context
                )
            )
    return found


def faults(rows: Iterable[Mapping[str, Any]], lengths: Mapping[str, int]) -> list[str]:
    """Engines that would not start: vLLM wants room for one request of the whole context.

    Args:
        lengths: context length by model.
    """
    return [
        f"{each['model']}: {each['phase']}: {each['tokens']} tokens of cache are less than one request of "
        f"{lengths[each['model']]}"
        for each in rows
        if each["configured"] and each["tokens"] < lengths[each["model"]]
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown. Formats that the profile does not choose are in brackets."""
    head = ("model", "phase", "GPUs", "weights", "GB", "GB per GPU", "cache", "bytes per token", "tokens")
    lines: list[tuple[str, ...]] = [(*head, "decode tokens/s at most")]
    lines.append(("---",) * len(lines[0]))
    for each in rows:
        gpus = "CPU" if each["gpu"] is None else f"{each['gpus']} x {each['gpu'].upper()}"
        bound = each["decode_tok_s_bound"]
        lines.append(
            (
                each["model"],
                each["phase"],
                gpus,
                each["weight_format"],
                f"{each['weights_gb_total']:.1f}",
                f"{each['weights_gb_per_gpu']:.1f}",
                each["kv_format"] if each["configured"] else f"({each['kv_format']})",
                f"{each['bytes_per_token']:,}",
                f"{each['tokens']:,}",
                "" if bound is None else f"{bound:,} at {each['batch']}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile", nargs="+", metavar="NAME", help="shipped profiles, or files (default: every shipped one)"
    )
    command.add_argument("--gpu", choices=sorted(GPUS), help="instead of the one that a profile names")
    command.add_argument(
        "--context-tokens", type=int, default=8192, help="of each request, for the bound on decoding"
    )
    command.add_argument("--markdown", action="store_true", help="print a table")


def read(name: str) -> tuple[Path, dict[str, Any]]:
    """A profile's file and content, by its name or by the path of its file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else MODELS / f"{name}.yaml"
    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as bad:
        raise PlanError(f"{name}: {bad}") from None
    if not isinstance(raw, dict) or not {"name", "context_length"} <= raw.keys():
        raise PlanError(f"{name}: {path} holds no profile: it must have `name` and `context_length`")
    return path, raw


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether every engine of it would start.

    Raises:
        PlanError, GeometryError: no plan can be made of a profile that was asked for.
    """
    if options.context_tokens < 1:
        raise PlanError("--context-tokens: at least 1")
    rows: list[dict[str, Any]] = []
    hashes: dict[str, str] = {}
    lengths: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for name in options.profile or sorted(file.stem for file in MODELS.glob("*.yaml")):
        path, profile = read(name)
        hashes[path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            rows += rows_of(profile, context=options.context_tokens, gpu=options.gpu)
        except PlanError as bad:
            if options.profile:
                raise
            left_out[name] = str(bad)
        else:
            lengths[profile["name"]] = profile["context_length"]
    invalid = faults(rows, lengths)
    result: dict[str, Any] = {
        "manifest": manifest(seed=options.seed, arguments=arguments, profile=None)
        | {"profiles_sha256": hashes},
        "summary": {
            "gb_bytes": GIB,
            "reserve_gib": RESERVE_GIB,
            "context_tokens": options.context_tokens,
            "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
            "left_out": left_out,
            "invalid": invalid,
            "valid": not invalid,
        },
        "rows": rows,
    }
    if options.markdown:
        result["table"] = table(rows)
    return result, not invalid
