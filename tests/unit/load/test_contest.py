import asyncio
import json
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from load.__main__ import parser
from load.capacity import Terms
from load.client import Target
from load.comparison import Measured
from load.contest import (
    ARMS,
    FLOOR,
    OURS,
    SAME_CORES,
    SAME_THREADS,
    against,
    complaints,
    floor,
    measure,
    table,
    totals,
    unequal,
)
from load.plan import Cell
from load.record import Record, failure

CELL = Cell(128, 1)


def answer(ttft: float = 1.0, seconds: float = 2.0, tokens: int = 20) -> Record:
    return Record(0.0, 0.0, (ttft, seconds), end_s=seconds, prompt_tokens=130, output_tokens=tokens)


def loop(cell: Cell = CELL, **records: Record) -> Measured:
    by_arm = {OURS: answer(), SAME_CORES: answer(), SAME_THREADS: answer()}
    names = {"ours": OURS, "cores": SAME_CORES, "threads": SAME_THREADS}
    by_arm |= {names[name]: record for name, record in records.items()}
    return Measured(cell, {arm: (record,) for arm, record in by_arm.items()})


def test_ratios_are_of_loops_with_the_same_prompts() -> None:
    measured = [loop(ours=answer(ttft=1.2)), loop(ours=answer(ttft=1.4)), loop(ours=answer(ttft=1.3))]

    found = against(measured, CELL, SAME_THREADS, Random(1))

    assert (found["loops"], found["ttft_ratio_p50"], found["throughput_ratio"]) == (3, 1.3, 1.0)
    assert found["ttft_ratio_p50_low95"] <= 1.3 <= found["ttft_ratio_p50_high95"]


def test_each_opponent_has_its_own_ratio_and_each_cell_too() -> None:
    other = Cell(128, 8)
    measured = [loop(ours=answer(seconds=4.0), cores=answer(seconds=1.0)), loop(other)]

    assert against(measured, CELL, SAME_CORES, Random(1))["throughput_ratio"] == 0.25
    assert against(measured, CELL, SAME_THREADS, Random(1))["throughput_ratio"] == 0.5
    assert against(measured, other, SAME_CORES, Random(1))["throughput_ratio"] == 1.0


def test_a_loop_with_a_failure_has_no_ratio() -> None:
    found = against([loop(cores=failure(0.0, 0.0, "503"))], CELL, SAME_CORES, Random(1))

    assert found == {"prompt_tokens_aim": 128, "concurrency": 1, "loops": 0}


@pytest.mark.parametrize(("ratio", "met"), [(FLOOR, True), (FLOOR + 0.01, False)])
def test_the_floor_is_of_one_client_and_of_the_worst_length(ratio: float, met: bool) -> None:
    cells: list[dict[str, Any]] = [
        {"concurrency": 1, "ttft_ratio_p50": 1.0},
        {"concurrency": 1, "ttft_ratio_p50": ratio},
        {"concurrency": 16, "ttft_ratio_p50": 9.0},
    ]

    assert floor(cells) == {"ttft_ratio_at_1": ratio, "at_most": FLOOR, "met": met}


def test_without_a_lone_client_nothing_is_said_of_the_floor() -> None:
    assert floor([{"concurrency": 2, "ttft_ratio_p50": 1.0}])["met"] is None


def test_every_cell_has_a_row_for_every_arm_with_its_own_cache() -> None:
    terms = {
        arm: Terms(ttft_bound_s=9, itl_bound_s=9, cache_gib=gib)
        for arm, gib in zip(ARMS, (2.0, 2.0, 1.0), strict=True)
    }

    rows = table([loop(), loop(Cell(128, 8))], terms)

    assert [(row["concurrency"], row["arm"]) for row in rows] == [(c, arm) for c in (1, 8) for arm in ARMS]
    assert [row["useful_tok_s_per_gib"] for row in rows[:3]] == [5.0, 5.0, 10.0]


def test_too_few_rounds_and_failures_are_complaints() -> None:
    assert complaints([{"failed": 0}], 3) == []
    assert len(complaints([{"failed": 1}], 2)) == 2


def test_servers_that_did_different_amounts_of_work_are_a_complaint() -> None:
    assert unequal([loop()]) == []
    assert len(unequal([loop(threads=answer(tokens=19))])) == 1
    assert unequal([loop(threads=failure(0.0, 0.0, "503"))]) == []


def test_the_plain_server_gets_all_threads_and_all_cache() -> None:
    engine = {"threads": 1, "cache_gib": 2}

    assert totals({"prefill": engine, "decode": engine | {"replicas": 2}}) == {"threads": 3, "cache_gib": 6}


async def test_three_servers_are_measured_in_turns_with_the_same_prompts() -> None:
    asked: dict[str, list[str]] = {arm: [] for arm in ARMS}

    async def serve(request: web.Request) -> web.Response:
        body = await request.json()
        asked[body["model"]].append(body["messages"][0]["content"])
        await asyncio.sleep(0.02)
        events = [
            {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}},
        ]
        return web.Response(text="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", serve)
    terms = dict.fromkeys(ARMS, Terms(ttft_bound_s=9, itl_bound_s=9, cache_gib=1.0))
    options = parser().parse_args(
        ["sweep", "--compare", "exact", "--concurrency", "1", "2", "--repeats", "3", "--per-client", "2"]
    )
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        header: dict[str, Any] = {}
        result, valid = await measure(options, header, {arm: Target(arm, url, arm) for arm in ARMS}, terms)

    assert header["rounds"] == 3
    measured = {arm: sorted(prompts[2:]) for arm, prompts in asked.items()}  # two each to warm up
    assert measured[OURS] == measured[SAME_CORES] == measured[SAME_THREADS]
    assert len(measured[OURS]) == 3 * (2 + 4)
    assert [(row["concurrency"], row["arm"], row["failed"]) for row in result["rows"]] == [
        (clients, arm, 0) for clients in (1, 2) for arm in ARMS
    ]
    assert result["summary"]["valid"] is valid
    if valid:  # the machine may be too busy to be believed
        assert [cell["loops"] for cell in result["summary"]["against"][SAME_CORES]] == [3, 3]
        assert result["summary"]["floor"]["ttft_ratio_at_1"] is not None
    else:
        assert result["summary"]["against"] is None
