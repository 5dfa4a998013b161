from typing import Any

from load.report import path_tables


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
