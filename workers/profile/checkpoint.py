"""In which format a model folder holds its weights, as its `config.json` tells it."""

from collections.abc import Mapping
from typing import Any, Final

from workers.profile.schema import WeightFormat

_PLAIN: Final[Mapping[str, WeightFormat]] = {"bfloat16": "bf16", "float32": "fp32"}
_INTEGERS: Final = frozenset({"awq", "gptq"})
_KINDS: Final[Mapping[tuple[str, str], WeightFormat]] = {
    ("4", "int"): "int4",
    ("4", "float"): "nvfp4",
    ("8", "float"): "fp8",
}
_NARROWEST_FIRST: Final[tuple[WeightFormat, ...]] = ("int4", "nvfp4", "fp8")


def weight_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """None: in one that no profile can name."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    quantised = config.get("quantization_config") or inner.get("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised(quantised)
    for at in (config, inner):
        if (named := at.get("dtype") or at.get("torch_dtype")) is not None:
            return _PLAIN.get(str(named))
    return None


def _quantised(by: Mapping[str, Any]) -> WeightFormat | None:
    method = str(by.get("quant_method", "")).lower()
    if method in _INTEGERS:
        return "int4" if by.get("bits") == 4 or by.get("w_bit") == 4 else None
    if method == "compressed-tensors":
        return _compressed(by.get("config_groups"))
    algorithm = str(by.get("quant_algo", "")).upper()
    if "NVFP4" in algorithm:
        return "nvfp4"
    return "fp8" if "fp8" in method or algorithm.startswith("FP8") else None


def _compressed(groups: object) -> WeightFormat | None:
    """The narrowest of the groups: what is quantised further is most of the model."""
    found: set[WeightFormat | None] = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.add(_KINDS.get((str(weights.get("num_bits")), str(weights.get("type")))))
    return next((each for each in _NARROWEST_FIRST if each in found), None)
