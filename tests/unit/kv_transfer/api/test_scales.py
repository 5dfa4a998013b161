"""Scale files: what is written is read again, and what is wrong is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.api import (
    LayerScales,
    Measured,
    ScaleFile,
    ScaleFileError,
    WireFormat,
    encode_scale_file,
    read_scale_file,
    scale_file_sha256,
    scale_for,
)

GOOD = ScaleFile(
    version=1,
    format=WireFormat.FP8_E4M3,
    source_revision="one",
    layers=(
        LayerScales(name="a", k=0.125, v=2.0, k_max=23.0, v_max=0.5),
        LayerScales(name="b", k=1.0, v=0.015625),
    ),
    measured=Measured(model="m", dtype="float32", tokens=9, text_sha256="0" * 64, margin=2.0, floor=1 / 64),
)


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    raw = json.loads(encode_scale_file(GOOD))
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(raw).encode()


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_bytes(encode_scale_file(GOOD))

    assert read_scale_file(path) == GOOD
    assert read_scale_file(path, sha256=scale_file_sha256(path)) == GOOD


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("layers", 1, "k"), 0.0, r"\$.layers\[1\].k"),
        (("layers", 1, "v"), -1.0, r"\$.layers\[1\].v"),
        (("layers", 0, "k"), 1e-60, r"\$.layers\[0\].k"),  # no float32
        (("layers", 0, "k"), float("inf"), "malformed"),
        (("layers", 0, "k"), "1", r"\$.layers\[0\].k"),
        (("layers", 0, "q"), 1.0, r"`q` - at `\$.layers\[0\]"),
        (("layers",), [], "layers: there are none"),
        (("layers", 1, "name"), "a", "layers: a is there twice"),
        (("format",), "bf16", "format: a cache in bf16 has no scales"),
        (("format",), "int8", r"\$.format"),
        (("version",), 2, r"\$.version"),
        (("measured", "tokens"), "many", r"\$.measured.tokens"),
    ],
    ids=str,
)
def test_a_file_that_holds_no_scales_is_refused_naming_itself_and_the_field(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, named: str
) -> None:
    file = tmp_path / "scales.json"
    file.write_bytes(changed(path, value))

    with pytest.raises(ScaleFileError, match=named) as refused:
        read_scale_file(file)
    assert str(refused.value).startswith(f"{file}: ")


def test_a_file_that_is_missing_or_has_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    for read in (read_scale_file, scale_file_sha256):
        with pytest.raises(ScaleFileError, match=r"scales.json: No such file"):
            read(file)
    file.write_bytes(encode_scale_file(GOOD))
    before = scale_file_sha256(file)
    file.write_bytes(changed(("layers", 0, "k"), 0.25))

    assert scale_file_sha256(file) != before
    with pytest.raises(ScaleFileError, match="has changed"):
        read_scale_file(file, sha256=before)


@pytest.mark.parametrize(
    ("largest", "format", "scale"),
    [
        (23.0, WireFormat.FP8_E4M3, 0.125),
        (224.0, WireFormat.FP8_E4M3, 1.0),
        (225.0, WireFormat.FP8_E4M3, 2.0),
        (0.0, WireFormat.FP8_E4M3, 1 / 64),
        (3.4, WireFormat.FP8_E4M3, 1 / 64),
        (3.6, WireFormat.FP8_E4M3, 1 / 32),
        (28672.0, WireFormat.FP8_E5M2, 1.0),
        (23.0, WireFormat.FP8_E5M2, 1 / 64),
    ],
)
def test_a_scale_leaves_room_for_twice_what_was_seen_and_never_less_than_the_floor(
    largest: float, format: WireFormat, scale: float
) -> None:
    assert scale_for(largest, format) == scale


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), -1.0])
def test_what_is_no_largest_value_has_no_scale(largest: float) -> None:
    with pytest.raises(ValueError, match="no largest absolute value"):
        scale_for(largest, WireFormat.FP8_E4M3)
