"""What the scheduler counts of requests that lose their pages to others."""

from pathlib import Path

import pytest

from kv_transfer.connector.scheduler import PhasegateScheduler
from tests.support.toy_engine import ToyEngine, connected_config


@pytest.mark.parametrize("pages", [6, 40])
def test_preemptions_are_counted(pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests grow to four pages each: in 6 pages one of them must wait."""
    preempted: list[str] = []
    real = PhasegateScheduler._preempt_request

    def preempt(scheduler: PhasegateScheduler, request: object, *args: object, **named: object) -> None:
        preempted.append(request.request_id)  # type: ignore[attr-defined]
        real(scheduler, request, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(PhasegateScheduler, "_preempt_request", preempt)
    engine = ToyEngine(connected_config(tmp_path, integrity=True), pages, PhasegateScheduler)
    try:
        for name in ("a", "b"):
            engine.add(name, [7] * 60, salt=name, max_tokens=60)
        engine.run()

        assert bool(preempted) == (pages == 6)
        assert engine.scheduler._counts() == (0, 0, len(preempted))
    finally:
        engine.close()
