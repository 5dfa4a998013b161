import json
from pathlib import Path
from typing import Any

import pytest

from load.capacity import HEADLINES
from load.report import cost_tables, formats_tables, path_tables, sweep_tables, tables_of


def result(**changed: Any) -> dict[str, Any]:
    ratio = {
        "ttft_ratio_p50": 1.254,
        "ttft_ratio_p50_low95": 1.1,
        "ttft_ratio_p50_high95": 1.3,
        "tok_s_ratio": 0.9,
        "tok_s_ratio_low95": 0.8,
        "tok_s_ratio_high95": 1.0,
    }
    row = {
        "arm": "ours",
        "prompt_tokens": 130,
        "concurrency": 4,
        "requests": 8,
        "ttft_ms_p50": 705.4,
        "itl_ms_p50": 80.2,
        "tok_s": 12.56,
    }
    cell = {"prompt_tokens": 128, "concurrency": 4}
    return {"rows": [row], "summary": ratio | {"cells": [cell | ratio]}, "cpu": [], "busy": []} | changed


def busy(stage: str, milliseconds: float) -> dict[str, Any]:
    return {"arm": "ours", "process": "prefill", "stage": stage, "busy_ms_per_request": milliseconds}


def cpu() -> dict[str, Any]:
    return {"arm": "ours", "process": "prefill", "cpu_ms_per_request": 41.6, "ttft_ms_p50": 700.4}


def test_a_row_and_its_ratios_read_as_the_documents_print_them() -> None:
    lines = path_tables(result()).splitlines()

    assert "| ours | 130 | 4 | 8 | 705 | 80 | 12.6 |" in lines
    assert "| 128 | 4 | 1.25 [1.10, 1.30] | 0.90 [0.80, 1.00] |" in lines
    assert "| all |  | 1.25 [1.10, 1.30] | 0.90 [0.80, 1.00] |" in lines


def test_stages_that_are_noise_are_left_out() -> None:
    text = path_tables(result(cpu=[cpu()], busy=[busy("model", 5.0), busy("HTTP", 4.9)]))

    assert "| ours | prefill | model | 5 |" in text
    assert "HTTP" not in text


def test_processor_time_stands_beside_the_first_tokens_time_of_the_same_window() -> None:
    assert "| ours | prefill | 42 | 700 |" in path_tables(result(cpu=[cpu()]))


def test_a_run_that_did_not_ask_where_time_goes_has_no_tables_of_it() -> None:
    text = path_tables(result())

    assert "processor ms" not in text
    assert "busy ms" not in text


def sweep_row(**changed: Any) -> dict[str, Any]:
    figures = dict.fromkeys(HEADLINES, 10.4) | {"requests": 12, "failed": 0}
    names = {"loop": "closed", "prompt_tokens_aim": 128, "concurrency": 4, "rate_rps": None}
    return names | figures | changed


def test_a_sweeps_rows_read_as_the_documents_print_them() -> None:
    rows = [
        sweep_row(throughput_tok_s=55.26),
        sweep_row(loop="open", concurrency=None, rate_rps=1.234, ttft_p50_ms=None),
    ]

    lines = sweep_tables({"rows": rows, "summary": {}}).splitlines()

    assert lines[2] == "| server | closed | 128 | 4 |  | 12 | 0 | 55.3 | 10 | 10 | 10 | 10 | 10 |"
    assert lines[3] == "| server | open | 128 |  | 1.23 | 12 | 0 | 10.4 |  | 10 | 10 | 10 | 10 |"


def test_a_comparison_has_its_ratios_by_opponent() -> None:
    ratio = {f"{name}{end}": 1.5 for name in ("ttft_ratio_p50", "throughput_ratio") for end in ENDS}
    cell = {"prompt_tokens_aim": 128, "concurrency": 1} | ratio

    text = sweep_tables({"rows": [sweep_row(arm="ours")], "summary": {"against": {"vllm": [cell]}}})

    assert "| vllm | 128 | 1 | 1.50 [1.50, 1.50] | 1.50 [1.50, 1.50] |" in text


ENDS = ("", "_low95", "_high95")


def cost_row(arm: str, us: float, **groups: float) -> dict[str, Any]:
    return {
        "streams": 64,
        "arm": arm,
        "windows": 5,
        "cpu_us_per_token": us,
        "ttft_added_ms_p50": 5.25,
        "itl_ms_p50": 20.0,
        "itl_ms_p95": 21.0,
        "us_per_token_by_group": groups,
    }


def test_costs_stand_by_arm_and_by_group() -> None:
    summary = {"streams": 64, "target": 0.6} | {f"ratio_to_handle{end}": 0.5 for end in ENDS}
    rows = [cost_row("token bus", 120.4, gateway=70.0), cost_row("serve handle", 240.8, gateway=140, ray=9)]

    text = cost_tables({"rows": rows, "summary": summary})

    assert "| 64 | token bus | 5 | 120 | 5.2 | 20.0 | 21.0 |" in text
    assert "| 64 | token bus | 70 |  |" in text
    assert "| 64 | serve handle | 140 | 9 |" in text
    assert "| 64 | 0.50 [0.50, 0.50] | 0.6 |" in text


def test_a_result_files_name_says_whose_tables_it_has(tmp_path: Path) -> None:
    file = tmp_path / "sweep-exact.json"
    file.write_text(json.dumps({"rows": [sweep_row()], "summary": {}}))

    assert tables_of(file) == sweep_tables({"rows": [sweep_row()], "summary": {}})
    with pytest.raises(KeyError):
        tables_of(tmp_path / "other.json")


def test_formats_have_a_row_for_each_configuration_and_loop_and_a_curve() -> None:
    scored = {"configuration": "BF16 to FP8", "prompts": 50, "dlogprob_first": 0.08, "argmax_agrees": 0.96}
    for name in ("dlogprob", "kl"):
        scored |= {name: 0.0453, f"{name}_low95": 0.0425, f"{name}_high95": 0.048}
    loops: list[dict[str, Any]] = [
        {
            "kv_format": kv_format,
            "pages": pages,
            "concurrency": concurrency,
            "loops": 3,
            "tok_s": tok_s,
            "itl_ms": 61.4,
            "useful_tok_s_per_gib": None if pages is None else 2 * tok_s,
            "cost_per_mtok": None,
            "preemptions": 0,
            "most_running": concurrency,
        }
        for kv_format, pages, concurrency, tok_s in (
            ("bf16", None, 4, 33.0),
            ("bf16", 12, 4, 31.0),
            ("bf16", 12, 8, 32.0),
            ("fp8_e4m3", 24, 4, 30.0),
            ("fp8_e4m3", 24, 8, 44.0),
        )
    ]

    text = formats_tables({"rows": [scored, *loops], "summary": {}})

    line = "| BF16 to FP8 | 50 | 0.0453 [0.0425, 0.0480] | 0.0453 [0.0425, 0.0480] | 0.0800 | 0.960 |"
    assert line in text
    assert "| bf16 | enough | 4 | 3 | 33.0 | 61 |  |  | 0 | 4 |" in text
    assert "| fp8_e4m3 | 24 | 8 | 3 | 44.0 | 61 | 88 |  | 0 | 8 |" in text
    assert 'x-axis "requests at once" [4, 8]' in text
    assert text.index("line [31.0, 32.0]") < text.index("line [30.0, 44.0]")


def test_formats_of_which_one_part_was_measured_have_the_tables_of_that_part() -> None:
    assert formats_tables({"rows": [], "summary": {}}) == ""
