"""Tensor parallel 2: a fault on one rank ends the request on both."""

import os
import subprocess
import sys

import msgspec
import pytest

from tests.support.small_engine import ROOT
from tests.support.two_ranks import PROMPTS, Round

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def rounds() -> dict[str, Round]:
    """In a process that ends with its workers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.two_ranks"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, Round])


def balanced(of: Round) -> bool:
    return (of.pages_missing, of.ledger_rows, of.steps_unchecked) == (0, 0, 0)


def test_a_wrong_table_on_one_rank_ends_its_request_alone(rounds: dict[str, Round]) -> None:
    right, spoilt = rounds["right"], rounds["spoilt"]

    assert right.mismatches == {}
    assert {answer.reason for answer in right.answers.values()} == {"length"}
    victim = spoilt.answers["a"]
    assert (victim.reason, victim.cause) == ("error", "reallocated")
    assert spoilt.mismatches == {"reallocated": 1}
    assert victim.tokens == right.answers["a"].tokens[: len(victim.tokens)]
    for name in PROMPTS.keys() - {"a"}:
        assert spoilt.answers[name] == right.answers[name]
    assert balanced(right)
    assert balanced(spoilt)


def test_afterwards_both_ranks_answer_as_before(rounds: dict[str, Round]) -> None:
    assert rounds["after"] == rounds["right"]


def test_without_the_check_on_that_rank_the_wrong_table_changes_the_answer(rounds: dict[str, Round]) -> None:
    """The other rank sees nothing wrong, and the neighbours' pages are only read."""
    right, unchecked = rounds["right"], rounds["unchecked"]

    assert unchecked.mismatches == {}
    assert unchecked.answers["a"].logprobs != right.answers["a"].logprobs
    for name in PROMPTS.keys() - {"a"}:
        assert unchecked.answers[name] == right.answers[name]
