"""Nothing that is right is flagged: real engines under loads that do all that can happen to a page."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.alarms import LEAST, row, shares, table
from tests.support.mixed_load import Account, Plan, accounts_of

pytestmark = pytest.mark.vllm

RESULT: Final = Path(__file__).parents[2] / "docs" / "results" / "integrity-false-alarms.json"
"""Written by the long forms."""
COMMAND: Final = "make check-long PART=integrity"


def tiny(requests: int, seed: int, **changed: Any) -> Plan:
    """Two layers, random weights. Preempted by equals and by those who matter more, in turn."""
    pages, policy = ((44, "fcfs"), (38, "priority"), (40, "fcfs"), (36, "priority"))[seed % 4]
    return Plan(requests=requests, seed=seed, pages=pages, policy=policy, **changed)


def smollm2(requests: int, seed: int, model_dir: Path) -> Plan:
    """Shorter prompts and pools: a step takes twenty times as long."""
    return Plan(
        requests=requests,
        seed=seed,
        model=str(model_dir),
        pages=16,
        sequences=8,
        batched_tokens=48,
        context=256,
        prefixes=(32, 64),
        answer=(16, 40),
    )


def assert_sound(accounts: Sequence[Account]) -> None:
    """Nobody was flagged, nothing was left out, and everything came back."""
    assert [account.mismatches for account in accounts] == [{}] * len(accounts)
    assert [account.errors for account in accounts] == [0] * len(accounts)
    assert [account.steps_unchecked for account in accounts] == [0] * len(accounts)
    assert all(account.pages_checked > account.steps > 0 for account in accounts)
    assert [(account.pages_missing, account.ledger_rows) for account in accounts] == [(0, 0)] * len(accounts)
    for account in accounts:
        assert account.requests >= account.plan.requests
        assert account.answers == account.requests - account.aborted - account.unheard
        assert account.shortest >= 16
        assert account.repeated > 0
        assert account.unlike == 0, "a text was answered in two ways"
    assert sum(account.shipped for account in accounts) > 0
    found = shares(accounts)
    assert {what: share for what, share in found.items() if share < LEAST[what]} == {}


@pytest.fixture(scope="module")
def accounts(model_dir: Path) -> list[Account]:
    plans = [tiny(250, 1), tiny(250, 2, tags_changed=3), smollm2(30, 3, model_dir)]
    return accounts_of(plans, within_s=540)


@pytest.mark.timeout(600)
def test_a_load_of_everything_that_happens_to_pages_flags_nobody(accounts: list[Account]) -> None:
    assert_sound(accounts[:2])
    assert_sound(accounts)


def test_a_tag_that_changes_behind_the_ledgers_back_ends_its_request_alone(accounts: list[Account]) -> None:
    """The proof that the load above would show a mismatch, were there one."""
    changed = accounts[1].changed

    assert len(changed) == 3
    for one in changed:
        assert one["failed"] == [one["victim"]]
        # The page is nobody's by then, and is kept back: its one reference is counted too.
        assert one["counted"] == {"reallocated": 1, "double_assigned": 1}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_9500_requests_on_two_layers_flag_nobody() -> None:
    accounts = run("two layers, random weights", [tiny(950, seed) for seed in range(100, 110)])

    assert_sound(accounts)
    assert sum(account.requests for account in accounts) >= 9500


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_500_requests_on_smollm2_flag_nobody(model_dir: Path) -> None:
    accounts = run("smollm2-135m, float32", [smollm2(100, seed, model_dir) for seed in range(200, 205)])

    assert_sound(accounts)
    assert sum(account.requests for account in accounts) >= 500


def run(model: str, plans: Sequence[Plan]) -> list[Account]:
    """One engine after the other; what they came to so far is recorded after each."""
    accounts: list[Account] = []
    for plan in plans:
        accounts += accounts_of([plan], within_s=3000)
        record(model, accounts)
    return accounts


def record(model: str, accounts: list[Account]) -> None:
    """Beside what is known of the other models."""
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {"models": {}}
    result["models"] = dict(sorted({**result["models"], model: row(accounts)}.items(), reverse=True))
    manifest = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": COMMAND,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": _vllm(),
    }
    recorded = {"manifest": manifest, "models": result["models"]}
    RESULT.write_text(json.dumps(recorded, indent=1) + "\n")
    sys.stdout.write(f"\n{table(result)}\n")


def _vllm() -> str:
    import vllm

    return str(vllm.__version__)
