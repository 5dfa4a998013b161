"""What `phasegate debug ledger` prints."""

from collections.abc import Iterator, Mapping
from typing import Any

_LOST = "-"
"""In place of a tag: attention never looks there, or the request lost the page."""


def text(ledgers: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the control surface's `/ledgers`."""
    lines = [line for replica, ledger in ledgers.items() for line in _lines(replica, ledger)]
    return "\n".join(lines) or "no replica answers"


def _lines(replica: str, ledger: Mapping[str, Any]) -> Iterator[str]:
    if ledger["ledger"] == "null":
        yield f"{replica}: no ledger: integrity is off, or the engine has no pages of a model"
        return
    yield f"{replica}: {len(ledger['rows'])} rows, {len(ledger['pages'])} pages with an owner"
    for row in ledger["rows"]:
        entries = zip(row["pages"], row["tags"], strict=False)  # a page may have come in between
        listed = " ".join(f"{page}:{_tag(tag)}" for page, tag in entries)
        yield f"  row   {row['request_id']}  group {row['group']}  {listed or 'empty'}"
    for page in ledger["pages"]:
        yield (
            f"  page  {page['page']}  tag {_tag(page['tag'])}  owners {', '.join(page['owners'])}  "
            f"writer {page['writer'] or 'nobody'}"
        )


def _tag(tag: int) -> str:
    return f"{tag:x}" if tag else _LOST
