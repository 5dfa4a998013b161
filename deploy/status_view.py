"""What `phasegate status` prints."""

from collections.abc import Iterator, Mapping
from typing import Any


def text(status: Mapping[str, Any]) -> str:
    """The control surface's `/status`: which profile runs, a table, and who gets no requests and why."""
    return "\n".join(_lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    if (profile := status["profile"]) is not None:
        yield profile["instead"] or f"profile {profile['name']}"
    yield (
        f"{'REPLICA':<12}{'PHASE':<10}{'FORMAT':<10}{'PID':>8}{'FREE':>14}{'RUN':>6}{'WAIT':>6}{'MOVING':>8}"
        f"{'BUS':>6}  CONTRACT"
    )
    for row in status["replicas"]:
        pages = f"{row['free_pages']}/{row['total_pages']}"
        yield (
            f"{row['id']:<12}{row['phase']:<10}{row['format']:<10}{row['pid']:>8}{pages:>14}"
            f"{row['running']:>6}{row['waiting']:>6}{row['in_flight_transfers']:>8}{row['bus_queue']:>6}"
            f"  {row['contract']}"
        )
    for row in status["gateways"]:
        told = f"gateway {row['id']}  pid {row['pid']}  in flight {row['in_flight']}"
        yield f"{told}  contract {row['contract']}"
    drifts = {drifted["why"]: drifted["id"] for row in status["gateways"] for drifted in row["drifted"]}
    for why, replica in drifts.items():
        yield f"{replica} gets no requests: {why}"
