"""What `python -m load formats` makes of probabilities."""

from pathlib import Path
from random import Random

import pytest
import yaml

from load import accuracy
from load.accuracy import (
    BF16,
    CALIBRATED,
    COMPARED,
    CONTROL,
    OURS,
    REFERENCE,
    STOCK,
    UNIFORM,
    UNIFORM_STOCK,
    Found,
)
from workers.profile.schema import parse_profile

BASE = yaml.safe_load((Path(__file__).parents[3] / "deploy/models/smollm2-135m.yaml").read_text())
ALL = [configuration for group in COMPARED for configuration in group]
TYPICAL = {
    BF16: 0.02,
    UNIFORM_STOCK: 0.08,
    UNIFORM: 0.05,
    STOCK: 0.07,
    OURS: 0.04,
    CONTROL: 1.0,
    CALIBRATED: 0.04,
}


def found(dlogprob: float, *, pair: bool, outcome: str = "shipped", prompts: int = 8) -> Found:
    """Each prompt a little worse than the one before."""
    numbers = tuple((dlogprob * (1 + n / 100),) * 3 for n in range(prompts))
    return Found(
        dlogprob=numbers,
        kl=tuple(tuple(n / 10 for n in row) for row in numbers),
        same_argmax=((True, True, False),) * prompts,
        outcomes=(outcome if pair else None,) * prompts,
    )


def all_found(**changes: float) -> dict[accuracy.Configuration, Found]:
    by_name = {c: changes.get(c.name, value) for c, value in TYPICAL.items()}
    return {c: found(value, pair=c.pair) for c, value in by_name.items()}


@pytest.mark.parametrize("configuration", [REFERENCE, *ALL], ids=lambda c: c.name)
def test_every_configuration_is_a_profile(configuration: accuracy.Configuration) -> None:
    raw = accuracy.profile_of(BASE, configuration, 2, Path("/scales.json"))
    profile = parse_profile(raw, source="test")

    assert profile.decode.format == configuration.kv_format
    assert profile.prefill.format == ("bf16" if configuration.pair else profile.prefill.format)
    assert (profile.decode.kv_scales is not None) == configuration.calibrated
    assert (profile.decode.threads, profile.prefill.threads) == (2, 2)


def test_configurations_that_share_engines_differ_in_nothing_that_engines_are_started_with() -> None:
    for group in COMPARED:
        assert len({str(accuracy.profile_of(BASE, c, 1, Path("/s"))) for c in group}) == 1
        assert [c.skew for c in group] == sorted(c.skew for c in group)


def test_all_configurations_are_told_apart() -> None:
    assert set(ALL) == set(TYPICAL)
    assert len({c.name for c in ALL}) == len(ALL)


def test_questions_are_fifty_and_carry_their_licence() -> None:
    assert len(set(accuracy.questions(50))) == 50
    assert len(accuracy.questions(3)) == 3
    assert "MIT License" in accuracy.QUESTIONS.read_text()


def test_what_is_shipped_is_better_when_it_is_better_prompt_by_prompt() -> None:
    told = accuracy.summary(all_found(), Random(1))

    assert told["more_accurate_than_uniform"]
    assert told["ours_less_uniform"] == pytest.approx(-0.01 * 1.035, abs=1e-4)
    assert told["ours_less_uniform_high95"] < 0
    assert told["dlogprob"][OURS.name] == pytest.approx(0.04 * 1.035)
    assert not accuracy.objections(all_found(), Random(1))


@pytest.mark.parametrize("other", [UNIFORM, UNIFORM_STOCK], ids=lambda c: c.name)
def test_it_is_not_better_when_one_of_the_uniform_ones_is_as_good(other: accuracy.Configuration) -> None:
    assert not accuracy.summary(all_found(**{other.name: 0.04}), Random(1))["more_accurate_than_uniform"]


def test_a_control_that_does_not_show_makes_the_run_invalid() -> None:
    assert accuracy.objections(all_found(**{CONTROL.name: 0.05}), Random(1)) == [
        "scales that are wrong on one side do not show"
    ]


def test_pages_that_were_not_shipped_make_the_run_invalid() -> None:
    each = all_found() | {OURS: found(0.04, pair=True, outcome="recomputed")}

    assert accuracy.objections(each, Random(1)) == ["BF16 to FP8: 8 hand-offs ended ['recomputed']"]


def test_rows_have_means_over_tokens_and_prompts() -> None:
    row = accuracy.rows({OURS: found(0.04, pair=True)}, Random(1))[0]

    assert row["dlogprob"] == pytest.approx(0.0414)
    assert row["dlogprob_low95"] < row["dlogprob"] < row["dlogprob_high95"]
    assert (row["argmax_agrees"], row["first_same"], row["shipped"]) == (0.6667, 8, 8)
