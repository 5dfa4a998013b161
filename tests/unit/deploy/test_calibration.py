"""Calibration, apart from the engine: which prompts are measured, and what becomes of what was seen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import calibration
from deploy.calibration import CalibrationError, prompts_of, refuse_taken, summary, text_of, write
from kv_transfer.api import WireFormat, read_scale_file
from workers.profile.schema import parse_profile

PROFILE = parse_profile(
    {
        "name": "own",
        "model_id": "own",
        "weights": {"path": "/models/own"},
        "source_revision": "one",
        "context_length": 64,
        "prefill": {"dtype": "float32"},
    },
    source="test",
)


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [-1, *self.encode(messages[0]["content"]), -2]


def test_the_text_is_cut_into_prompts_and_each_paragraph_is_asked_as_a_message() -> None:
    text = "a bb ccc\n\n\ndddd e ff\n"

    assert list(prompts_of(text, Words(None), 4)) == [[1, 2, 3, 4], [1, 2]]
    assert list(prompts_of(text, Words("..."), 4)) == [
        [1, 2, 3, 4],
        [1, 2],
        [-1, 1, 2, 3],
        [-1, 4, 1, 2],
    ]


def test_our_sample_is_long_enough_to_mean_something_and_of_several_kinds() -> None:
    text = text_of(calibration.SAMPLE)

    assert len(text.split()) > 900
    assert text.count("\n\n") >= 10


def measured(monkeypatch: pytest.MonkeyPatch, ranges: dict[str, tuple[float, float]]) -> list[list[int]]:
    """Instead of an engine; returns the prompts it is given."""
    given: list[list[int]] = []

    def measure(profile: Any, model_dir: str, prompts: list[list[int]], *, device: str) -> Any:
        given.extend(prompts)
        return ranges

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(calibration, "_tokenizer", lambda folder: Words(None))
    return given


def test_what_was_seen_becomes_a_file_that_an_engine_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = measured(monkeypatch, {"a": (23.0, 0.5), "b": (1000.0, 0.0)})
    file = calibration.calibrate(PROFILE, tmp_path, "one two three " * 30)
    out = tmp_path / "scales.json"
    write(file, out)

    assert [len(ids) for ids in given] == [63, 27]
    read = read_scale_file(out)
    assert read == file
    assert (read.format, read.source_revision) == (WireFormat.FP8_E4M3, "one")
    assert [(layer.name, layer.k, layer.v) for layer in read.layers] == [
        ("a", 0.125, 1 / 64),
        ("b", 8.0, 1 / 64),
    ]
    assert read.measured is not None
    assert (read.measured.tokens, read.measured.dtype) == (90, "float32")
    assert [line.split() for line in summary(file)][1] == ["a", "23.000", "0.125", "0.500", "0.01562"]


def test_a_model_that_computes_no_numbers_gets_no_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, {"a": (float("nan"), 0.5)})

    with pytest.raises(CalibrationError, match="a: keys or values hold NaN or Inf"):
        calibration.calibrate(PROFILE, tmp_path, "one two")


def test_what_cannot_be_measured_is_told_before_an_engine_starts(tmp_path: Path) -> None:
    scripted = SimpleNamespace(name="scripted", engine="scripted")
    with pytest.raises(CalibrationError, match="has no model"):
        calibration.calibrate(scripted, tmp_path, "text")  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="has no tokenizer"):
        calibration.calibrate(PROFILE, tmp_path, "text")
    binary = tmp_path / "text"
    binary.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(CalibrationError, match="UTF-8"):
        text_of(binary)
    with pytest.raises(CalibrationError, match="cannot be read"):
        text_of(tmp_path / "none")


def test_a_file_that_an_engine_may_be_using_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "scales.json"
    refuse_taken(out)
    out.write_text("old")

    with pytest.raises(CalibrationError, match="exists"):
        refuse_taken(out)
    assert out.read_text() == "old"
