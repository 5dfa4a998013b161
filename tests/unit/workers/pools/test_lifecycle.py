import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.pools.lifecycle import IllegalMove, Intake, Refusal, Stage

ORDER = [Stage.STARTING, Stage.READY, Stage.DRAINING, Stage.STOPPED]


def ready(capacity: int = 1) -> Intake:
    intake = Intake(capacity)
    intake.move(Stage.READY)
    return intake


def test_a_replica_takes_requests_up_to_its_capacity() -> None:
    intake = ready(2)

    assert [intake.enter(), intake.enter(), intake.enter()] == [None, None, Refusal.BUSY]
    intake.leave()
    assert intake.enter() is None


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.DRAINING, Stage.STOPPED])
def test_no_stage_but_ready_takes_requests_and_the_refusal_names_the_stage(stage: Stage) -> None:
    intake = Intake(1)
    for step in ORDER[1 : ORDER.index(stage) + 1]:
        intake.move(step)

    assert intake.enter() == Refusal(stage)
    assert intake.inside == 0


def test_leaving_twice_is_an_error() -> None:
    intake = ready()
    intake.enter()
    intake.leave()

    with pytest.raises(IllegalMove):
        intake.leave()


@given(st.lists(st.sampled_from(list(Stage)), max_size=8))
def test_a_stage_never_goes_back_and_a_refused_move_changes_nothing(moves: list[Stage]) -> None:
    intake = Intake(1)
    for move in moves:
        before = intake.stage
        try:
            intake.move(move)
        except IllegalMove:
            assert intake.stage is before
        else:
            assert ORDER.index(intake.stage) > ORDER.index(before)
