"""The plan, against published figures, and against what this project has measured."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from load.__main__ import main
from load.geometry import parse_geometry
from load.gpus import GPUS
from load.manifest import ROOT
from load.planner import (
    MODELS,
    RESERVE_GIB,
    Engine,
    PlanError,
    decode_bound,
    engine_of,
    faults,
    read,
    rows_of,
    step_bytes,
    table,
    tokens_held,
    weights_bytes,
)
from workers.profile.hardware import GPU_CAPABILITY
from workers.profile.schema import PhaseProfile

WITHIN = 0.05
SHIPPED = sorted(file.stem for file in MODELS.glob("*.yaml"))


def rows(name: str, **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = rows_of(read(name)[1], **{"context": 8192, **options})
    return {(row["phase"], row["kv_format"]): row for row in found}


PUBLISHED: list[tuple[str, str, str, str, str, float]] = [
    ("Kimi K2.6: tokens, BF16 cache", "kimi-k2.6", "prefill", "bf16", "tokens", 686_000),
    ("Kimi K2.6: tokens, FP8 cache", "kimi-k2.6", "decode", "fp8_e4m3", "tokens", 1_370_000),
    ("Kimi K2.6: GB of weights", "kimi-k2.6", "decode", "fp8_e4m3", "weights_gb_total", 595e9 / 2**30),
    ("GLM 5.2: GB of weights, FP8", "glm-5.2", "prefill", "bf16", "weights_gb_total", 705),
    ("GLM 5.2: GB on each GPU, FP8", "glm-5.2", "prefill", "bf16", "weights_gb_per_gpu", 88),
    ("GLM 5.2: GB of weights, INT4", "glm-5.2", "decode", "fp8_e4m3", "weights_gb_total", 421),
    ("GLM 5.2: GB on each GPU, INT4", "glm-5.2", "decode", "fp8_e4m3", "weights_gb_per_gpu", 52),
    ("GLM 5.2: tokens, FP8 cache", "glm-5.2", "decode", "fp8_e4m3", "tokens", 1_180_000),
]
"""Of 8 x H200. Kimi's weights: ~595 GB on disk, models/moonshotai/Kimi-K2.6.yaml of vllm-project/recipes."""


@pytest.mark.parametrize(("what", "name", "phase", "kv_format", "column", "figure"), PUBLISHED)
def test_the_plan_reproduces_what_was_published_and_the_document_says_how_nearly(
    what: str, name: str, phase: str, kv_format: str, column: str, figure: float
) -> None:
    row = rows(name)[phase, kv_format]
    form = "{:,.0f}" if column == "tokens" else "{:.1f}"
    said = " | ".join(
        (what, form.format(figure), form.format(row[column]), f"{row[column] / figure - 1:+.1%}")
    )

    assert (row["gpus"], row["gpu"], row["configured"]) == (8, "h200", True)
    assert row[column] == pytest.approx(figure, rel=WITHIN)
    assert f"| {said} |" in (ROOT / "docs/planning.md").read_text()


@pytest.mark.parametrize(("gib", "reproduced"), [(113, False), (114, True), (116, True), (117, False)])
def test_the_document_says_how_much_room_the_published_figures_leave_open(gib: int, reproduced: bool) -> None:
    """For weights and pages of one GPU: what fraction and reserve leave together."""
    assert "114 to 116" in (ROOT / "docs/planning.md").read_text()
    fraction = (gib + RESERVE_GIB) / GPUS["h200"].memory_gib
    near = []
    for _, name, phase, kv_format, _, figure in (each for each in PUBLISHED if each[4] == "tokens"):
        profile = read(name)[1]
        changed = profile | {phase: profile[phase] | {"memory_fraction": fraction}}
        found = next(
            row
            for row in rows_of(changed, context=8192)
            if (row["phase"], row["kv_format"]) == (phase, kv_format)
        )
        near.append(found["tokens"] == pytest.approx(figure, rel=WITHIN))

    assert all(near) is reproduced


def test_the_readme_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "kimi-k2.6", "glm-5.2", "qwen3-32b", "--markdown"]) == 0

    assert capsys.readouterr().out in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "phase", "kv_format", "tokens"),
    [
        ("smollm2-135m", "prefill", "bf16", 46_592),
        ("smollm2-135m", "decode", "fp8_e4m3", 93_184),
        ("smollm2-135m-bf16", "decode", "bf16", 46_592),
        ("exact", "decode", "fp32", 23_296),
    ],
)
def test_tokens_are_those_that_an_engine_of_the_profile_has_here(
    name: str, phase: str, kv_format: str, tokens: int
) -> None:
    row = rows(name)[phase, kv_format]

    assert (row["tokens"], row["configured"]) == (tokens, True)


def test_fp8_holds_twice_as_much_where_no_scales_are_kept() -> None:
    kimi = rows("kimi-k2.6")

    assert kimi["decode", "fp8_e4m3"]["tokens"] == pytest.approx(
        2 * kimi["decode", "bf16"]["tokens"], rel=0.001
    )


def test_pages_are_whole() -> None:
    for name in ("kimi-k2.6", "glm-5.2", "qwen3-32b", "exact"):
        block = read(name)[1]["block_size"]
        for row in rows(name).values():
            assert row["tokens"] % block == 0
            assert row["page_bytes"] == row["bytes_per_token"] * block


def test_weights_and_pages_are_within_the_share_of_a_gpu_and_another_page_is_not() -> None:
    profile = read("glm-5.2")[1]
    geometry = parse_geometry(profile["geometry"], source="glm-5.2")
    engine = engine_of(profile["decode"])
    tokens = tokens_held(engine, geometry, "fp8_e4m3", 64)
    share = 0.85 * GPUS["h200"].memory_gib * 2**30 - 4 * 2**30 - weights_bytes(engine, geometry)[1]

    assert tokens * geometry.bytes_per_token("fp8_e4m3", 8) <= share
    assert (tokens + 64) * geometry.bytes_per_token("fp8_e4m3", 8) > share


def test_a_dense_model_at_one_request_reads_its_weights_once_for_each_token() -> None:
    """The bound that everybody knows: bandwidth over bytes of weights, when the cache is empty."""
    profile = read("qwen3-32b")[1]
    geometry, engine = parse_geometry(profile["geometry"], source="q"), Engine(gpu="h200")
    looked_up = 2 * geometry.vocab_size * geometry.hidden_size
    read_bytes = 2 * geometry.parameters - looked_up

    step = step_bytes(engine, geometry, "bf16", 1, 0)

    assert step == read_bytes
    assert decode_bound(step, 1, GPUS["h200"]) == pytest.approx(4.8e12 / read_bytes)


def test_a_batch_reads_more_experts_but_none_twice() -> None:
    profile = read("kimi-k2.6")[1]
    geometry, engine = parse_geometry(profile["geometry"], source="k"), engine_of(profile["decode"])
    one, many, all_ = (step_bytes(engine, geometry, "bf16", batch, 0) for batch in (1, 16, 100_000))
    experts = next(part for part in geometry.parts() if part.kind == "expert")
    on_each = engine.bytes_on_each(experts, geometry)

    assert one < many < all_
    assert all_ - one == pytest.approx(on_each * (1 - 8 / 384))


def test_decode_is_bounded_and_prefill_is_not_claimed() -> None:
    qwen = rows("qwen3-32b")

    assert qwen["prefill", "bf16"]["decode_tok_s_bound"] is None
    assert qwen["decode", "fp8_e4m3"]["decode_tok_s_bound"] > qwen["decode", "bf16"]["decode_tok_s_bound"]
    assert rows("exact")["decode", "fp32"]["decode_tok_s_bound"] is None, "of a CPU nothing is known"


def test_another_gpu_is_planned_for_on_demand() -> None:
    smaller, larger = (rows("qwen3-32b", gpu=name)["decode", "bf16"] for name in ("h200", "b200"))

    assert (smaller["gpu"], larger["gpu"]) == ("h200", "b200")
    assert smaller["tokens"] < larger["tokens"]
    assert rows("exact", gpu="b200")["decode", "fp32"]["gpu"] is None


def test_what_does_not_fit_holds_nothing_and_is_told() -> None:
    profile = read("qwen3-32b")[1]
    tight = profile | {"prefill": profile["prefill"] | {"memory_fraction": 0.1}}
    found = rows_of(tight, context=8192)

    assert [row["tokens"] for row in found if row["phase"] == "prefill"] == [0, 0]
    (told,) = faults(found, {"qwen3-32b": profile["context_length"]})
    assert told == "qwen3-32b: prefill: 0 tokens of cache are less than one request of 40960"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"geometry": None}, "no `geometry`"),
        ({"engine": "scripted"}, "compute nothing"),
        ({"decode": {"memory_fraction": 0.9}}, "of which GPU"),
        ({"decode": {"gpu": "t4"}}, "gpu: 't4' is none of"),
        ({"decode": {"weight_format": "int2"}}, "weight_format: 'int2' is none of"),
    ],
)
def test_of_what_no_plan_can_be_made_the_reason_is_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        rows_of(read("qwen3-32b")[1] | change, context=8192)


def test_a_phase_that_says_nothing_has_the_defaults_of_a_profile() -> None:
    ours = {field.name: getattr(Engine(), field.name) for field in fields(Engine)}

    assert ours == {name: getattr(PhaseProfile(), name) for name in ours}


def test_every_gpu_that_a_profile_can_name_is_known() -> None:
    assert GPUS.keys() == GPU_CAPABILITY.keys()


def test_the_command_plans_every_shipped_profile_by_itself(tmp_path: Path) -> None:
    assert main(["plan", "--json", str(tmp_path / "plan.json")]) == 0
    result = json.loads((tmp_path / "plan.json").read_text())

    planned = {row["model"] for row in result["rows"]}
    assert planned | set(result["summary"]["left_out"]) == set(SHIPPED)
    assert set(result["summary"]["left_out"]) == {"scripted"}
    assert result["manifest"]["profiles_sha256"].keys() == set(SHIPPED)
    assert (result["summary"]["invalid"], result["summary"]["valid"]) == ([], True)


def test_a_profile_of_ones_own_is_planned_by_the_path_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(read("qwen3-32b")[1] | {"name": "own"}))

    assert main(["plan", "--profile", str(file), "--markdown"]) == 0
    assert "| own | decode | 1 x H200 | fp8 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--profile", "absent"], ["--profile", "scripted"], ["--context-tokens", "0"]]
)
def test_a_mistake_ends_with_one_line_and_not_well(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 1
    told = capsys.readouterr().err

    assert told.startswith("load: error: ")
    assert told.count("\n") == 1


def test_in_the_table_formats_that_the_profile_does_not_choose_are_in_brackets() -> None:
    lines = table(rows("qwen3-32b").values()).splitlines()

    assert [line.split(" | ")[6] for line in lines[2:]] == ["bf16", "(fp8_e4m3)", "(bf16)", "fp8_e4m3"]
