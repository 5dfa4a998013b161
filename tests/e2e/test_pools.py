"""A load ramp on one prefill and two decode engines: new requests move to the denser pool, and back.

Engines are scripted: nothing is computed, pages and pace are real, and so are Serve, gateway and token bus.
"""

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.stack import ROOT, Stack, eventually, running_stack

pytestmark = [pytest.mark.long, pytest.mark.ray]

WIDE, DENSE = "bf16", "fp8_e4m3"
PAGES = 256  # of the wide pool: one request of the context's length
ANSWER = 224
"""Tokens, at 20 ms each: a request lives for 4.5 s and ends with about 9 pages."""
BEFORE_THE_MARK = 60
"""Requests of a ramp that come before two pools hold `dense_above` of the wide one's pages, at most."""


def profile(folder: Path) -> Path:
    raw = yaml.safe_load((ROOT / "deploy/models/scripted.yaml").read_text())
    raw |= {"name": "two-pools", "dense_above": 0.6, "dense_below": 0.3}
    raw["decode"]["script"] |= {"pages": PAGES}
    raw["dense"] = raw["decode"] | {
        "kv_format": DENSE,
        "script": raw["decode"]["script"] | {"pages": 2 * PAGES},
    }
    path = folder / "two-pools.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def counted(stack: Stack) -> tuple[dict[str, float], float, float]:
    """Requests by format, switches, and the share of the wide pool's pages in use at the last request."""
    page = stack.internal("/metrics").text.splitlines()

    def told(series: str, label: str = "") -> float:
        (line,) = [line for line in page if line.startswith(f"phasegate_decode_{series}") and label in line]
        return float(line.split()[-1])

    by_format = {name: told("requests_total", f'format="{name}"') for name in (WIDE, DENSE)}
    return by_format, told("format_switches_total"), told("pages_used_ratio")


async def arrivals(stack: Stack, count: int, gap_s: float) -> None:
    """An open loop; ends when all are answered."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(number: int) -> None:
            await asyncio.sleep(number * gap_s)
            body = {
                "model": stack.model,
                "messages": [{"role": "user", "content": f"{number} tell me of the sea"}],
                "max_tokens": ANSWER,
            }
            answer = await client.post(stack.chat_url, json=body, headers=stack.headers)
            assert answer.status_code == 200, answer.text

        await asyncio.gather(*(ask(number) for number in range(count)))


@pytest.mark.timeout(400)
def test_a_ramp_moves_new_requests_to_the_dense_pool_and_back(tmp_path: Path) -> None:
    config = {"limits": {"max_in_flight": 256}}
    with running_stack(tmp_path, profile=str(profile(tmp_path)), config=config) as stack:
        rows = stack.status()["replicas"]
        assert sorted((row["phase"], row["format"]) for row in rows) == [
            ("decode", WIDE),
            ("decode", DENSE),
            ("prefill", WIDE),
        ]

        asyncio.run(arrivals(stack, 20, 0.5))  # about nine at once: 50 pages
        calm, switches, used = counted(stack)
        assert (calm, switches) == ({WIDE: 20, DENSE: 0}, 0)
        assert 0 < used < 0.6

        asyncio.run(arrivals(stack, 200, 0.06))  # 75 at once: 400 pages
        ramp, switches, _ = counted(stack)
        assert switches == 1
        # Those before the mark: 0.6 x 256 pages with the requests of the first seconds.
        assert ramp[DENSE] >= 0.8 * (200 - BEFORE_THE_MARK)

        eventually(stack.status, lambda s: not any(row["running"] + row["waiting"] for row in s["replicas"]))
        asyncio.run(arrivals(stack, 20, 0.5))
        after, switches, used = counted(stack)
        assert switches == 2
        assert after[WIDE] - ramp[WIDE] >= 0.8 * 20
        assert used < 0.6
