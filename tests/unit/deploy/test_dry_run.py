"""`phasegate preflight --dry-run`: what vLLM would be told, judged by vLLM alone."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import main
from deploy.dry_run import report
from deploy.preflight import load_profile
from deploy.yaml_file import ConfigError
from workers.profile.schema import parse_profile

BIG = ("kimi-k2.6", "glm-5.2", "qwen3-32b")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def changed(name: str, **changes: Any) -> Any:
    raw = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "models" / f"{name}.yaml").read_text())
    for path, value in changes.items():
        *sections, key = path.split("__")
        inner = raw
        for section in sections:
            inner = inner[section]
        inner[key] = value
    return parse_profile(raw, source=name)


def lines(name: str) -> dict[str, list[str]]:
    """By phase, its options."""
    found: dict[str, list[str]] = {}
    for line in report(load_profile(name, Path("/absent"))):
        if line.startswith("  "):
            found[list(found)[-1]].append(line.strip())
        elif line.endswith(":"):
            found[line.partition(" ")[0]] = []
    return found


@pytest.mark.parametrize("name", [*BIG, "exact", "smollm2-135m", "smollm2-135m-bf16"])
def test_vllm_takes_the_arguments_of_both_phases_of_a_shipped_profile(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--profile", name, "--dry-run"]) == 0
    said = capsys.readouterr().out

    assert "takes these arguments" in said
    assert said.count("--kv-transfer-config") == 2


def test_kimi_is_started_on_eight_gpus_with_its_whole_context_and_a_cache_in_fp8_on_decode_alone() -> None:
    kimi = lines("kimi-k2.6")

    for phase in ("prefill", "decode"):
        assert {
            "--model /models/kimi-k2.6",
            "--tensor-parallel-size 8",
            "--distributed-executor-backend mp",
            "--max-model-len 262144",
            "--block-size 64",
            "--gpu-memory-utilization 0.85",
            "--language-model-only",
        } <= set(kimi[phase])
        assert not [line for line in kimi[phase] if line.startswith("--kv-cache-memory-bytes")]
    assert "--kv-cache-dtype auto" in kimi["prefill"]
    assert "--kv-cache-dtype fp8_e4m3" in kimi["decode"]


def test_glm_has_weights_of_its_own_in_each_phase_and_the_name_of_fp8_that_sparse_attention_takes() -> None:
    glm = lines("glm-5.2")

    assert {"--model /models/glm-5.2-fp8", "--kv-cache-dtype bfloat16"} <= set(glm["prefill"])
    assert {"--model /models/glm-5.2-int4", "--kv-cache-dtype fp8"} <= set(glm["decode"])


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("glm-5.2", ["indexer's cache cannot be shipped", "several GPUs"]),
        ("kimi-k2.6", ["several GPUs"]),
        ("exact", []),
    ],
)
def test_what_this_system_has_not_done_yet_is_noted(name: str, notes: list[str]) -> None:
    said = [line for line in report(load_profile(name, Path("/absent"))) if line.startswith("note: ")]

    assert len(said) == len(notes)
    assert all(note in line for note, line in zip(notes, said, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode__weight_format": "nvfp4"}, "need a GPU of compute capability 10.0, and this one has 9.0"),
        ({"tool_parser": "kimi_k9"}, "tool_parser: vLLM has no 'kimi_k9'"),
        ({"decode__kv_format": "fp8_e5m2"}, "no kernel reads a cache of MLA in fp8_e5m2"),
    ],
)
def test_what_would_not_start_is_told_with_what_would(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(report(changed("kimi-k2.6", **change)))


def test_everything_is_told_at_once_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load((Path(__file__).parents[3] / "deploy/models/kimi-k2.6.yaml").read_text())
    raw["reasoning_parser"] = "nobody"
    raw["decode"]["weight_format"] = "nvfp4"
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(raw))

    assert main(["preflight", "--profile", str(file), "--dry-run"]) == 1
    said = capsys.readouterr().err

    assert "phasegate: error: profile kimi-k2.6 would not start:" in said
    assert "decode.weight_format" in said
    assert "reasoning_parser: vLLM has no 'nobody'" in said


def test_a_scripted_profile_has_nothing_to_be_judged() -> None:
    with pytest.raises(ConfigError, match="vLLM is told nothing"):
        list(report(load_profile("scripted", Path("/absent"))))


def test_without_a_dry_run_the_machine_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--profile", "kimi-k2.6", "--state", str(tmp_path / "state")]) == 1
    said = capsys.readouterr().err

    assert "8 x H200 needed, and engines run on the CPU here" in said
    assert not (tmp_path / "state").exists()
