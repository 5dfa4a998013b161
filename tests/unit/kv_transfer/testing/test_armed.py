from pathlib import Path

import msgspec
import pytest

from kv_transfer.api.faults import FaultConfig, FaultPhase, PageFaultKind, PageFaultOrder
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.testing.armed import Armed, Landed, arm, disarm, landed
from kv_transfer.testing.step_faults import ArmedStepFaults, NoStepFaults, step_faults
from kv_transfer.testing.table_faults import spoil_pages

ORDER = PageFaultOrder(kind=PageFaultKind.FLIP_LAST, phase=FaultPhase.DECODE, victim="a", other="b")


def test_a_fault_waits_in_its_folder_until_it_is_let_loose(tmp_path: Path) -> None:
    armed = Armed(tmp_path)
    assert armed.orders() == {}

    arm(tmp_path, "one", ORDER)

    assert armed.orders() == {"one": ORDER}
    assert landed(tmp_path) == {}
    what = Landed(victim="a-1", other="b-2", page=7, instead=3)
    armed.landed("one", what)
    assert armed.orders() == {}
    assert landed(tmp_path) == {"one": what}


def test_a_fault_can_be_called_off_and_forgotten(tmp_path: Path) -> None:
    arm(tmp_path, "one", ORDER)
    arm(tmp_path, "two", ORDER)
    Armed(tmp_path).landed("one", Landed(victim="a"))

    disarm(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_fault_is_an_error_and_not_a_fault_that_never_comes(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"kind": "flip_lats", "phase": "decode", "victim": "a"}')

    with pytest.raises(msgspec.ValidationError, match="flip_lats"):
        Armed(tmp_path).orders()


def test_without_a_folder_no_step_is_spoiled(tmp_path: Path) -> None:
    assert isinstance(step_faults(FaultConfig()), NoStepFaults)
    assert isinstance(step_faults(FaultConfig(page_faults=str(tmp_path))), ArmedStepFaults)


def test_an_engine_without_the_setting_has_no_faults() -> None:
    raw = {
        "engine_id": "e",
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": "ipc://x",
        "membership_file": "x",
    }
    assert ConnectorConfig.parse(raw).faults == FaultConfig()
    told = ConnectorConfig.parse(raw | {"faults": {"page_faults": "/faults"}})
    assert told.faults.page_faults == "/faults"
    with pytest.raises(msgspec.ValidationError, match=r"faults\.page_faults"):
        ConnectorConfig.parse(raw | {"faults": {"page_faults": "/faults"}, "backend": "nccl"})


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (PageFaultKind.FLIP_LAST, [4, 5, 9, 7, 0]),
        (PageFaultKind.FLIP_MIDDLE, [4, 9, 6, 7, 0]),
        (PageFaultKind.FLIP_BEYOND, [4, 5, 6, 9, 0]),
        (PageFaultKind.SHIFT_ROW, [5, 6, 6, 7, 0]),
    ],
)
def test_what_becomes_of_a_row_of_three_pages_and_what_lies_behind(
    kind: PageFaultKind, wrong: list[int]
) -> None:
    assert spoil_pages(kind, [4, 5, 6, 7, 0], 3, 9) == wrong
