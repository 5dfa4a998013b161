from typing import Any

import pytest

from tests.support.replicas import PROFILE
from workers.api import BUS_VERSION, Frame
from workers.pools.config import ReplicaConfig, ReplicaConfigError


def a_config(**changes: Any) -> ReplicaConfig:
    return ReplicaConfig(**({"profile": PROFILE, "model_dir": "/models/tiny"} | changes))


def test_production_refuses_faults_on_purpose() -> None:
    with pytest.raises(ReplicaConfigError, match="mode is dev"):
        a_config(testing={"drop_bus_frame": 3})


def test_production_refuses_an_engine_that_makes_answers_up() -> None:
    scripted = PROFILE | {"engine": "scripted"}

    with pytest.raises(ReplicaConfigError, match=r"profile\.engine: scripted"):
        a_config(profile=scripted)

    assert a_config(profile=scripted, mode="dev").model_profile().engine == "scripted"


def test_production_refuses_an_engine_that_does_not_check_its_pages() -> None:
    unchecked = PROFILE | {"integrity": False}

    with pytest.raises(ReplicaConfigError, match=r"profile\.integrity: off"):
        a_config(profile=unchecked)

    assert not a_config(profile=unchecked, mode="dev").model_profile().integrity


@pytest.mark.parametrize(
    ("testing", "named"),
    [({"drop_bus": 1}, "drop_bus"), ({"drop_bus_frame": 0}, "drop_bus_frame")],
)
def test_a_fault_that_does_not_exist_is_named(testing: dict[str, int], named: str) -> None:
    with pytest.raises(ReplicaConfigError, match=rf"testing\.{named}:"):
        a_config(mode="dev", testing=testing)


def test_exactly_the_nth_frame_is_dropped() -> None:
    drop = a_config(mode="dev", testing={"drop_bus_frame": 2}).drop()
    frame = Frame(version=BUS_VERSION, engine_id="e", items=())

    assert drop is not None
    assert [drop(frame) for _ in range(4)] == [False, True, False, False]


def test_without_testing_nothing_is_dropped_or_shipped_wrong() -> None:
    config = a_config()

    assert config.drop() is None
    assert config.connector_faults() == {}


def test_page_faults_reach_the_engine_in_dev_and_are_refused_in_production() -> None:
    assert a_config(mode="dev", testing={"page_faults": "/faults"}).connector_faults() == {
        "page_faults": "/faults"
    }
    with pytest.raises(ReplicaConfigError, match="mode is dev"):
        a_config(mode="production", testing={"page_faults": "/faults"})


def test_barriers_reach_the_transfer_in_dev_and_are_refused_in_production() -> None:
    config = a_config(mode="dev", testing={"holds": "/barriers"})

    assert config.holds() == "/barriers"
    assert config.connector_faults() == {"holds": "/barriers"}
    with pytest.raises(ReplicaConfigError, match="mode is dev"):
        a_config(mode="production", testing={"holds": "/barriers"})
