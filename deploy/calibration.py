"""Measures the keys and values of a model over a text, and makes the scales of an FP8 cache of them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from deploy.model_store import ModelError
from kv_transfer.api import (
    BYTE_WIDE,
    FLOOR,
    MARGIN,
    LayerScales,
    Measured,
    ScaleFile,
    WireFormat,
    encode_scale_file,
    scale_for,
)
from workers.engine.ranges import UnmeasuredModel, measure
from workers.profile.schema import ModelProfile
from workers.profile.vllm_args import Device

SAMPLE: Final = Path(__file__).parent / "calibration.txt"
WINDOW: Final = 1024
"""Tokens of a prompt. The largest keys are often those of its first tokens: several prompts have several."""


class CalibrationError(ModelError):
    """There are no scales. The message says why."""


def calibrate(profile: ModelProfile, folder: Path, text: str, *, device: Device = "cpu") -> ScaleFile:
    """
    Args:
        folder: with the model.

    Raises:
        CalibrationError
    """
    if profile.engine != "vllm":
        raise CalibrationError(f"profile {profile.name} has no model: its engine is {profile.engine}")
    prompts = list(prompts_of(text, _tokenizer(folder), min(WINDOW, profile.context_length - 1)))
    if not prompts:
        raise CalibrationError("the text is empty")
    try:
        seen = measure(profile, str(folder), prompts, device=device)
    except UnmeasuredModel as bad:
        raise CalibrationError(f"profile {profile.name}: {bad}") from None
    wanted = profile.densest.decode.format
    target = wanted if wanted in BYTE_WIDE else WireFormat.FP8_E4M3
    return ScaleFile(
        version=1,
        format=target,
        source_revision=profile.source_revision,
        layers=tuple(_layer(name, k, v, target) for name, (k, v) in seen.items()),
        measured=Measured(
            model=profile.model_id,
            dtype=profile.prefill.dtype,
            tokens=sum(map(len, prompts)),
            text_sha256=hashlib.sha256(text.encode()).hexdigest(),
            margin=MARGIN,
            floor=FLOOR,
        ),
    )


def prompts_of(text: str, tokenizer: Any, longest: int) -> Iterator[list[int]]:
    """The text in pieces of at most `longest` tokens, and each paragraph as a user's message."""
    ids = tokenizer.encode(text)
    for start in range(0, len(ids), longest):
        yield ids[start : start + longest]
    if tokenizer.chat_template is None:
        return
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        message = [{"role": "user", "content": paragraph}]
        asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        yield asked[:longest]


def text_of(path: Path) -> str:
    """Raises CalibrationError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as bad:
        raise CalibrationError(f"{path} cannot be read as UTF-8 text: {bad}") from None


def refuse_taken(out: Path) -> None:
    """Never write over a file: an engine may be using it.

    Raises:
        CalibrationError: there is one.
    """
    if out.exists():
        raise CalibrationError(f"{out} exists: remove it, or choose another with --out")


def write(file: ScaleFile, out: Path) -> None:
    """Raises CalibrationError when there is such a file, OSError when there cannot be one."""
    refuse_taken(out)
    with out.open("xb") as stream:
        stream.write(encode_scale_file(file))


def summary(file: ScaleFile) -> Iterator[str]:
    """For people."""
    yield f"{'LAYER':<40}{'K MAX':>10}{'K SCALE':>10}{'V MAX':>10}{'V SCALE':>10}"
    for layer in file.layers:
        k_max, v_max = layer.k_max or 0.0, layer.v_max or 0.0
        yield f"{layer.name:<40}{k_max:>10.3f}{layer.k:>10.4g}{v_max:>10.3f}{layer.v:>10.4g}"


def _layer(name: str, k: float, v: float, target: WireFormat) -> LayerScales:
    try:
        return LayerScales(name=name, k=scale_for(k, target), v=scale_for(v, target), k_max=k, v_max=v)
    except ValueError:
        raise CalibrationError(f"{name}: keys or values hold NaN or Inf") from None


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as bad:
        raise CalibrationError(f"{folder} has no tokenizer that can be read: {bad}") from None
