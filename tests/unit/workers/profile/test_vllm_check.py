"""vLLM's own command line takes what a profile says, and refuses what it does not know."""

import json
from typing import Any

import pytest

from tests.unit.workers.profile.test_vllm_args import a_profile, arguments
from workers.api import Phase
from workers.profile.vllm_args import Device, command_line
from workers.profile.vllm_check import refusal, shown, unknown_parsers

vllm = pytest.mark.vllm
long = pytest.mark.timeout(120)


def test_arguments_become_words_of_a_command_line() -> None:
    given = {
        "max_num_seqs": 4,
        "async_scheduling": True,
        "enforce_eager": False,
        "of": None,
        "all": {"a": [1]},
    }

    assert command_line(given) == [
        *("--max-num-seqs", "4"),
        "--async-scheduling",
        "--no-enforce-eager",
        *("--all", '{"a": [1]}'),
    ]


def test_words_are_shown_with_one_option_on_each_line_fit_for_a_shell() -> None:
    words = ["--model", "/a b", "--async-scheduling", "--all", '{"a": 1}']

    assert list(shown(words)) == ["--model '/a b'", "--async-scheduling", "--all '{\"a\": 1}'"]


@vllm
@long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", list(Phase))
def test_vllm_takes_every_word(phase: Phase, device: Device) -> None:
    assert refusal(command_line(arguments(phase, device))) is None


@vllm
@long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"no_such_option": 1}, "unrecognized arguments: --no-such-option 1"),
        ({"kv_cache_dtype": "fp9"}, "invalid choice: 'fp9'"),
        ({"max_num_seqs": "many"}, "max-num-seqs: invalid"),
        ({"kv_transfer_config": {"kv_role": "kv_nobody"}}, "kv_nobody"),
    ],
)
def test_vllm_refuses_what_it_does_not_know_and_says_what(change: dict[str, Any], said: str) -> None:
    told = refusal(command_line(arguments(Phase.DECODE, "cuda") | change))

    assert told is not None
    assert said in told
    assert "\n" not in told


@vllm
@long
def test_a_parser_that_vllm_does_not_have_is_told_with_the_nearest() -> None:
    profile = a_profile(tool_parser="kimi_k3000", reasoning_parser="zz")

    tools, reasoning = unknown_parsers(profile)

    assert tools.startswith("tool_parser: vLLM has no 'kimi_k3000'; the nearest are kimi_k")
    assert reasoning.startswith("reasoning_parser: vLLM has no 'zz'")
    assert list(unknown_parsers(a_profile(tool_parser="kimi_k2", reasoning_parser="qwen3"))) == []
    assert list(unknown_parsers(a_profile())) == []


@vllm
@long
def test_words_survive_vllms_own_reading() -> None:
    """What vLLM understands is what the engine is given when it is started for real."""
    from workers.profile.vllm_check import command_parser

    given = arguments(Phase.PREFILL, "cuda", prefill={"gpu": "h200", "memory_fraction": 0.85})
    read = vars(command_parser().parse_args(command_line(given)))

    simple = {
        name: value for name, value in given.items() if value is not None and not isinstance(value, dict)
    }
    assert {name: read[name] for name in simple} == simple
    transfer = given["kv_transfer_config"]
    assert json.loads(json.dumps(transfer)) == {
        name: getattr(read["kv_transfer_config"], name) for name in transfer
    }
