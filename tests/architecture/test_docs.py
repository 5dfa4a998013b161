"""What the documents promise exists."""

import argparse
import re
from pathlib import Path

import pytest

from deploy.cli import parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(parsed: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Every command of the CLI, as words."""
    deeper = [a for a in parsed._actions if isinstance(a, argparse._SubParsersAction)]
    if not deeper:
        return {words}
    return {found for name, child in deeper[0].choices.items() for found in commands(child, (*words, name))}


def test_every_command_of_the_cli_is_in_operations_and_no_other() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    told = {
        tuple(re.findall(r"[a-z]+", match))
        for match in re.findall(r"`phasegate ((?:config |debug |key |model )?[a-z]+)", text)
    }

    assert told == commands(parser())


def test_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()

    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:3]) for path in (ROOT / "docs/decisions").glob("*.md"))

    assert numbers == list(range(1, len(numbers) + 1))


def test_nothing_that_the_product_is_called_by_hides_another_package() -> None:
    """Our top-level names are generic: no installed package may own one of them."""
    from importlib.metadata import packages_distributions

    owners = packages_distributions()
    ours = ("gateway", "workers", "kv_transfer", "deploy", "load")

    assert {name: owners[name] for name in ours if set(owners.get(name, [])) - {"phasegate"}} == {}
