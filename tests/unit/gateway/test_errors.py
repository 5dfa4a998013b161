import pickle  # noqa: TID251 - what Ray does to errors is the thing under test
import re
from pathlib import Path

import pytest

from gateway.errors import FAULT_TO_ERROR, ApiError, ContextOverflow, for_fault
from gateway.rest.problem import problem
from workers.api import FaultKind

KINDS = ApiError.__subclasses__()
DOCS = Path(__file__).parents[3] / "docs/errors.md"


def test_every_worker_fault_has_a_client_error() -> None:
    """Adding a FaultKind without deciding what the client sees must fail here."""
    assert set(FAULT_TO_ERROR) == set(FaultKind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_error_survives_a_process_boundary(kind: type[ApiError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("no room", "max_tokens", 2)))  # noqa: S301

    assert (type(copy), str(copy), copy.param, copy.retry_after_s) == (kind, "no room", "max_tokens", 2)


def test_every_client_error_is_in_the_docs_and_nothing_else_is() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (\d+) \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)

    assert sorted((int(status), int(number), code) for status, number, code in rows) == sorted(
        (kind.status, kind.number, kind.code) for kind in KINDS
    )


def test_one_word_means_one_error() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", FaultKind)
def test_busy_answers_always_say_when_to_come_back(kind: FaultKind) -> None:
    error = for_fault(kind)

    assert (problem(error).headers.get("retry-after", "0") > "0") == (error.status in (429, 503))


def test_overflow_has_both_phrases_that_clients_parse() -> None:
    message = ContextOverflow.of(90, 20, 100, param="max_tokens").message

    assert re.search(r"maximum context length is 100 tokens\. However, you requested 110 tokens", message)
    assert re.search(
        r"input and maximum output tokens \(110\) exceeded this model context window limit \(100\)", message
    )
