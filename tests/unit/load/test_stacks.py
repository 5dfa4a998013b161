import pytest

from load.stacks import SAMPLES_PER_S, count, rows, stage

MODEL = "run (vllm/v1/engine/core.py:9);execute_model (vllm/v1/worker/cpu_model_runner.py:5)"
CONNECTOR = f"{MODEL};save (kv_transfer/connector/worker.py:3);wait (threading.py:1)"


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        (MODEL, "model"),
        (CONNECTOR, "connector"),
        (f"{MODEL};linear (torch/nn/functional.py:2)", "model"),
        (f"{MODEL};onednn_mm (vllm/_custom_ops.py:2)", "model"),
        ("run (ray/serve/replica.py:1);poll (vllm/v1/engine/core.py:9)", "engine front end"),
        ("run (uvicorn/server.py:1);send (gateway/rest/completion.py:1)", "gateway"),
        ("run (gateway/app.py:1);render (gateway/prompt/renderer.py:1)", "render and detokenise"),
        ("main (asyncio/runners.py:1)", "other"),
        (
            "a model (vllm/v1/worker/x.py:1);poll (kv_transfer/x.py:1);step (vllm/v1/core/sched.py:1)",
            "engine scheduler",
        ),
    ],
)
def test_a_sample_belongs_to_its_innermost_named_frame(stack: str, name: str) -> None:
    assert stage(stack) == name


def test_samples_of_a_stage_add_up() -> None:
    assert count(f"{MODEL} 3\n{CONNECTOR} 2\n\n{MODEL} 4\n") == {"model": 7, "connector": 2}


def test_a_line_without_a_count_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        count(MODEL)


def test_busy_time_is_per_request_and_the_largest_comes_first() -> None:
    found = rows({"prefill": count(f"{CONNECTOR} 1\n{MODEL} {SAMPLES_PER_S}")}, requests=10)

    assert [(row["stage"], row["busy_ms_per_request"]) for row in found] == [
        ("model", 100.0),
        ("connector", 2.0),
    ]
