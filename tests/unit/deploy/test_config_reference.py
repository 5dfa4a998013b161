from pathlib import Path
from typing import Any

import pytest

from deploy.config import SystemConfig, leaves
from deploy.config_reference import COMMAND, docstrings, document, words

PAGE = Path(__file__).parents[3] / "docs/configuration.md"


def test_the_committed_page_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text() == document(), f"run: {COMMAND}"


def test_every_key_of_the_schema_is_on_the_page_and_explained() -> None:
    text = document()
    for key, _, _ in leaves(SystemConfig()):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{key.rpartition('.')[2]}` |"))

        assert row.rstrip("| ").count("|") >= 4, f"{key} has no docstring"


@pytest.mark.parametrize(
    ("kind", "said"),
    [(str | None, "text or `null`"), (int, "whole number"), (tuple[str, ...], "list of text")],
)
def test_types_are_told_in_words(kind: Any, said: str) -> None:
    assert words(kind) == said


def test_a_docstring_belongs_to_the_field_above_it() -> None:
    assert docstrings(SystemConfig)["profile"] == "Name of a model profile, or path of its file."
    assert "limits" not in docstrings(SystemConfig)
