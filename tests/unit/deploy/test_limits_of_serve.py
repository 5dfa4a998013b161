"""Every deployment has a bound on what it takes in and on what waits before it."""

from pathlib import Path
from typing import Literal

import pytest
import yaml

from deploy import app
from deploy.config import ConfigError, LimitsConfig, SystemConfig, parse
from workers.api import Phase
from workers.profile.schema import parse_profile

EXACT = Path(__file__).parents[3] / "deploy" / "models" / "exact.yaml"


def plan(limits: LimitsConfig, ingress: Literal["haproxy", "proxy"] = "haproxy") -> app.Plan:
    return app.Plan(
        config=SystemConfig(limits=limits, ingress=ingress),
        profile=parse_profile(yaml.safe_load(EXACT.read_text()), source="exact"),
        model_dirs={Phase.PREFILL: Path("/wide"), Phase.DECODE: Path("/narrow")},
        gateway_secrets=Path("/secrets"),
        logs=Path("/logs"),
    )


def test_no_deployment_queues_without_a_bound_or_is_killed_within_its_grace() -> None:
    limits = LimitsConfig(max_in_flight=10, max_queued=3, shutdown_grace_s=7)
    gateway = app.build(plan(limits))._bound_deployment
    pools = [bound._bound_deployment for bound in gateway.init_args[-2:]]

    assert (gateway.max_ongoing_requests, gateway.max_queued_requests) == (10 + app.MARGIN, 3)
    refusal = gateway._deployment_config.backpressure_config
    assert (refusal.status_code, refusal.retry_after_s) == (429, 1)
    for deployment in (gateway, *pools):
        assert 0 < deployment.max_queued_requests <= 10 + app.MARGIN
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 7 + app.CUT_MARGIN_S


def test_a_burst_for_which_there_is_room_is_not_refused_before_serves_own_proxy() -> None:
    """It counts each request as waiting until a replica has taken it."""
    limits = LimitsConfig(max_in_flight=10, max_queued=3)
    gateway = app.build(plan(limits, ingress="proxy"))._bound_deployment

    assert gateway.max_queued_requests == 10 + 3


def test_each_phase_loads_its_own_folder_and_the_gateway_has_prefills_tokenizer() -> None:
    two = plan(LimitsConfig())

    assert [app.replica_config(two, phase).model_dir for phase in Phase] == ["/wide", "/narrow"]
    assert app.gateway_config(two).model.model_dir == "/wide"
    bound = app.build(two)._bound_deployment.init_args[-2:]
    assert {b._bound_deployment.name: b._bound_deployment.init_args[0].model_dir for b in bound} == {
        "Prefill": "/wide",
        "Decode": "/narrow",
    }


def test_barriers_need_an_absolute_path() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        parse({"testing": {"holds": "here"}}, source="test")
