"""What `phasegate status --integrity` prints."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the replicas in the control surface's `/status`."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        f"{'REPLICA':<12}{'PHASE':<10}{'LEDGER':<12}{'FORMAT':<8}{'DEVICE':<8}{'SINCE':<22}"
        f"{'CHECKED':>10}{'UNCHECKED':>11}{'PAGES':>13}  MISMATCHES"
    )
    for row in rows:
        told = row["integrity"]
        since = datetime.fromtimestamp(told["since"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = ", ".join(f"{cause} {count}" for cause, count in sorted(told["mismatches"].items()))
        yield (
            f"{row['id']:<12}{row['phase']:<10}{told['coverage']['ledger']:<12}{row['format']:<8}"
            f"{told['device']:<8}{since:<22}{told['steps_checked']:>10}{told['steps_unchecked']:>11}"
            f"{told['pages_checked']:>13}  {found or 'none'}"
        )
    for row in rows:
        coverage = row["integrity"]["coverage"]
        yield f"{row['id']} checks: {', '.join(coverage['checked']) or 'nothing'}"
        if coverage["unchecked"]:
            yield f"{row['id']} does not check: {', '.join(coverage['unchecked'])}"
