"""`GET .../ai/integrity`: what stands between a wrong page and an answer, for each model of the asking key.

Figures are those of a model's engines, for all who use it together: no tenant, no request, no page.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.rest.access import tenant_of
from gateway.services import Services
from workers.api import Gauges, IntegrityCounts, ReplicaInfo


async def coverage(request: Request) -> Response:
    services: Services = request.app.state.services
    tenant = tenant_of(request)
    result = [
        {"model": served.facts.id, **report(served.engines.fleet.engines())}
        for served in services.models
        if tenant.may_use(served.facts.id)
    ]
    return JSONResponse({"result": result, "success": True, "errors": [], "messages": []})


def report(engines: Iterable[tuple[ReplicaInfo, Gauges | None]]) -> dict[str, Any]:
    """Of the engines that have reported, as one. Without any, coverage and counts are null: nothing is known.

    What one engine does not check counts as unchecked, whatever the others do.
    """
    attached = list(engines)
    heard = [(info, gauges.integrity) for info, gauges in attached if gauges is not None]
    return {
        "engines": len(heard),
        "engines_without_report": len(attached) - len(heard),
        "coverage": _coverage([info for info, _ in heard]) if heard else None,
        "counts": _counts([counts for _, counts in heard]) if heard else None,
    }


def _coverage(infos: list[ReplicaInfo]) -> dict[str, Any]:
    covers = [info.coverage for info in infos]
    unchecked = list(dict.fromkeys(check for cover in covers for check in cover.unchecked))
    checked = dict.fromkeys(check for cover in covers for check in cover.checked)
    return {
        "ledger": "null" if any(cover.ledger == "null" for cover in covers) else "generation",
        "checked": [check for check in checked if check not in unchecked],
        "unchecked": unchecked,
        "formats": sorted({info.format for info in infos}),
        "hardware": sorted({info.device for info in infos}),
        "since": min(info.started_at for info in infos),
    }


def _counts(counts: list[IntegrityCounts]) -> dict[str, Any]:
    mismatches: Counter[str] = Counter()
    for each in counts:
        mismatches.update(each.mismatches)
    return {
        "steps_checked": sum(each.steps_checked for each in counts),
        "steps_unchecked": sum(each.steps_unchecked for each in counts),
        "pages_checked": sum(each.pages_checked for each in counts),
        "mismatches": dict(sorted(mismatches.items())),
    }
