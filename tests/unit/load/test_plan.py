from random import Random

from hypothesis import given
from hypothesis import strategies as st

from load.plan import Cell, rounds

CELLS = [Cell(tokens, concurrency) for tokens in (32, 128) for concurrency in (1, 4)]
ARMS = ("a", "b", "c")


@given(st.integers(0, 1000), st.integers(1, 5))
def test_every_round_has_every_cell_once_and_every_pair_all_arms(seed: int, repeats: int) -> None:
    plan = rounds(CELLS, ARMS, repeats, Random(seed))

    assert [sorted(pair.cell for pair in pairs) for pairs in plan] == [CELLS] * repeats
    assert all(sorted(pair.order) == ["a", "b", "c"] for pairs in plan for pair in pairs)


def test_the_same_seed_plans_the_same_requests() -> None:
    assert rounds(CELLS, ARMS, 3, Random(7)) == rounds(CELLS, ARMS, 3, Random(7))
    assert rounds(CELLS, ARMS, 3, Random(7)) != rounds(CELLS, ARMS, 3, Random(8))


def test_no_arm_is_always_first() -> None:
    first = [pair.order[0] for pairs in rounds(CELLS, ARMS, 50, Random(1)) for pair in pairs]

    assert all(40 < first.count(arm) < 95 for arm in ARMS)


def test_no_two_pairs_share_their_prompts() -> None:
    seeds = [pair.prompt_seed for pairs in rounds(CELLS, ARMS, 20, Random(1)) for pair in pairs]

    assert len(set(seeds)) == len(seeds)
