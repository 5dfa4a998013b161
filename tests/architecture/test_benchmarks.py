"""Figures in the documents are those of the result files."""

import json
from pathlib import Path

import pytest

from load.report import tables_of
from tests.support import aborts, alarms, deaths, soak

ROOT = Path(__file__).parents[2]
UNDER_STRESS = {
    "aborts": (aborts.table, "operations"),
    "deaths": (deaths.table, "operations"),
    "soak": (soak.table, "operations"),
    "integrity-false-alarms": (alarms.table, "integrity"),
}
"""Results of the long tests, and the document of each table; the others are those of `python -m load`."""
RESULTS = [f for f in sorted((ROOT / "docs/results").glob("*.json")) if f.stem not in UNDER_STRESS]


def test_there_are_results() -> None:
    assert RESULTS


@pytest.mark.parametrize("result", RESULTS, ids=lambda p: p.name)
def test_tables_in_the_document_are_those_of_the_result(result: Path) -> None:
    document = (ROOT / "docs/benchmarks.md").read_text()

    assert tables_of(result) in document


@pytest.mark.parametrize("result", RESULTS, ids=lambda p: p.name)
def test_a_published_result_is_valid(result: Path) -> None:
    summary = json.loads(result.read_text())["summary"]

    assert summary["invalid"] == []
    if result.name.startswith("path-"):
        assert summary["failed"] == 0
    else:
        assert summary["valid"] is True


@pytest.mark.parametrize("part", UNDER_STRESS)
def test_tables_of_the_long_tests_are_those_of_their_results(part: str) -> None:
    result = json.loads((ROOT / f"docs/results/{part}.json").read_text())

    table, document = UNDER_STRESS[part]

    assert table(result) in (ROOT / f"docs/{document}.md").read_text()


def test_no_recorded_run_without_a_fault_flagged_anybody() -> None:
    models = json.loads((ROOT / "docs/results/integrity-false-alarms.json").read_text())["models"]

    for of_model in models.values():
        assert {what: of_model[what] for what in alarms.WRONG if of_model[what]} == {}
        assert {what for what, least in alarms.LEAST.items() if of_model["shares"][what] < least} == set()
