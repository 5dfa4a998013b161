"""`GET .../ai/integrity`: what tenants are told of the checks on pages, and what not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kv_transfer.api import LEDGER_CHECKS, TABLE_CHECKS, Coverage
from tests.support.gateways import (
    ACCOUNT,
    AUTH,
    KEY,
    LIMITED_KEY,
    MODEL,
    OTHER_MODEL,
    TestGateway,
    running_gateway,
)
from workers.api import IntegrityCounts

PATH = f"/client/v4/accounts/{ACCOUNT}/ai/integrity"
FULL = Coverage(ledger="generation", checked=LEDGER_CHECKS + TABLE_CHECKS, unchecked=())
LEDGER_ONLY = Coverage(ledger="generation", checked=LEDGER_CHECKS, unchecked=TABLE_CHECKS)
PREFILLS = IntegrityCounts(steps_checked=5, pages_checked=70, mismatches={"stale_prefix": 1})
DECODES = IntegrityCounts(
    steps_checked=2, steps_unchecked=3, pages_checked=30, mismatches={"stale_prefix": 2, "freed": 1}
)


@asynccontextmanager
async def engines(**of: Coverage) -> AsyncIterator[TestGateway]:
    """A gateway whose engines check so much, by replica; they have reported nothing yet."""
    async with running_gateway(attach=False) as gateway:
        gateway.pool.coverage.update(of)
        gateway.pool.devices["d1"] = "cuda"
        gateway.fleet.refresh(gateway.bus.address)
        for _ in range(5):
            await asyncio.sleep(0)
        yield gateway


async def say(gateway: TestGateway, **reports: IntegrityCounts) -> None:
    """Heartbeats, and that they are taken in."""
    for replica_id, counts in reports.items():
        await gateway.pool.heartbeat(replica_id, integrity=counts)
    for _ in range(500):
        heard = {info.replica_id: gauges for info, gauges in gateway.fleet.engines()}
        if all((gauges := heard[name]) and gauges.integrity == reports[name] for name in reports):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not heard: {heard}")


async def told(gateway: TestGateway, key: str = KEY) -> list[dict[str, Any]]:
    answer = await gateway.client.get(PATH, headers={"authorization": f"Bearer {key}"})
    body = answer.json()
    assert (answer.status_code, body["success"], body["errors"], body["messages"]) == (200, True, [], [])
    rows: list[dict[str, Any]] = body["result"]
    return rows


async def test_what_all_engines_check_and_have_found_is_told_for_each_model() -> None:
    async with engines(p1=FULL, d1=FULL) as gateway:
        await say(gateway, p1=PREFILLS, d1=DECODES)
        first, second = await told(gateway)

    # The whole answer: nothing in it names a tenant, a request, a page or an engine.
    assert first == {
        "model": MODEL,
        "engines": 2,
        "engines_without_report": 0,
        "coverage": {
            "ledger": "generation",
            "checked": [*LEDGER_CHECKS, *TABLE_CHECKS],
            "unchecked": [],
            "formats": ["bf16"],
            "hardware": ["cpu", "cuda"],
            "since": 1000,
        },
        "counts": {
            "steps_checked": 7,
            "steps_unchecked": 3,
            "pages_checked": 100,
            "mismatches": {"freed": 1, "stale_prefix": 3},
        },
    }
    assert second == {**first, "model": OTHER_MODEL}


@pytest.mark.parametrize(
    ("weaker", "ledger", "checked"),
    [
        (LEDGER_ONLY, "generation", LEDGER_CHECKS),
        (Coverage(ledger="null", checked=(), unchecked=LEDGER_CHECKS + TABLE_CHECKS), "null", ()),
    ],
)
@pytest.mark.parametrize("where", ["p1", "d1"])
async def test_what_one_engine_does_not_check_is_not_told_as_checked(
    weaker: Coverage, ledger: str, checked: tuple[str, ...], where: str
) -> None:
    async with engines(**{"p1": FULL, "d1": FULL} | {where: weaker}) as gateway:
        await say(gateway, p1=PREFILLS, d1=DECODES)
        coverage = (await told(gateway))[0]["coverage"]

    assert coverage["ledger"] == ledger
    assert coverage["checked"] == list(checked)
    assert coverage["unchecked"] == list(weaker.unchecked)


async def test_before_any_report_nothing_is_known_rather_than_zero() -> None:
    async with engines(p1=FULL, d1=FULL) as gateway:
        before = (await told(gateway))[0]
        await say(gateway, d1=DECODES)
        after = (await told(gateway))[0]

    assert before == {
        "model": MODEL,
        "engines": 0,
        "engines_without_report": 2,
        "coverage": None,
        "counts": None,
    }
    assert (after["engines"], after["engines_without_report"]) == (1, 1)
    assert after["counts"]["steps_unchecked"] == 3
    assert after["coverage"]["since"] == 2000


async def test_without_engines_it_is_answered_all_the_same() -> None:
    async with running_gateway(attach=False) as gateway:
        rows = await told(gateway)

    assert [(row["engines"], row["engines_without_report"], row["coverage"]) for row in rows] == [
        (0, 0, None)
    ] * 2


async def test_a_key_is_told_of_its_own_models_only() -> None:
    async with engines() as gateway:
        rows = await told(gateway, LIMITED_KEY)

    assert [row["model"] for row in rows] == [OTHER_MODEL]


async def test_it_needs_a_key_of_the_account() -> None:
    async with engines() as gateway:
        nobody = await gateway.client.get(PATH)
        foreign = await gateway.client.get(PATH.replace(ACCOUNT, "b" * 32), headers=AUTH)
        posted = await gateway.client.post(PATH, headers=AUTH, json={})

    assert (nobody.status_code, nobody.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "account_forbidden")
    assert posted.status_code == 405
