"""What runs without a fault came to, put together: shares, and the table of the document."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.support.mixed_load import Account

LEAST: Final[Mapping[str, float]] = {"preempted": 0.2, "hits": 0.2, "chunked": 0.2, "aborted": 0.1}
"""Of all requests of a run; one request may be several of these."""
WRONG: Final = ("mismatches", "steps_unchecked", "errors", "unlike", "pages_missing", "ledger_rows")
"""Must be none. `unlike`: a text that was answered in two ways."""


def shares(accounts: "Sequence[Account]") -> dict[str, float]:
    requests = total(accounts, "requests")
    return {what: total(accounts, what) / requests for what in LEAST}


def total(accounts: "Sequence[Account]", what: str) -> int:
    return sum(getattr(account, what) for account in accounts)


def row(accounts: "Sequence[Account]") -> dict[str, Any]:
    """Of the result file: sums over the engines of one model."""
    counted = ("requests", *LEAST, "shipped", "in_vain", "siblings", "resets", "steps", "pages_checked")
    return {
        "engines": len(accounts),
        **{what: total(accounts, what) for what in (*counted, "repeated", *WRONG[1:])},
        "mismatches": sum(sum(account.mismatches.values()) for account in accounts),
        "shares": {what: round(share, 3) for what, share in shares(accounts).items()},
        "seconds": round(sum(account.seconds for account in accounts), 1),
        "seeds": [account.plan.seed for account in accounts],
    }


def table(result: Mapping[str, Any]) -> str:
    """The table of the document, from the result."""
    names = ("preempted", "prefix hit", "prompt in chunks", "aborted", "pages over a link")
    heads = ("model", "requests", *names, "steps", "pages checked", "steps unchecked", "mismatches")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for model, of_model in result["models"].items():
        some = [f"{of_model['shares'][what]:.0%}" for what in LEAST]
        cells = [model, f"{of_model['requests']:,}", *some]
        cells += [f"{of_model[what]:,}" for what in ("shipped", "steps", "pages_checked")]
        cells += [f"{of_model[what]:,}" for what in ("steps_unchecked", "mismatches")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
