"""Pages that hold no numbers stop their transfer, from the lane's thread and once."""

import torch

from kv_transfer.codec import Encoded, NonfiniteSource
from kv_transfer.connector.judged import Flaws, JudgedFence
from kv_transfer.integrity.device import NOTHING_SEEN


def pages(*flaws: list[int]) -> Encoded:
    return Encoded(torch.zeros(4, dtype=torch.uint8), (7, 8), torch.tensor(flaws))


def test_neither_what_is_flawed_leaves_nor_what_follows_it_and_that_is_told_once() -> None:
    told: list[NonfiniteSource] = []
    flaws = Flaws(told.append)
    groups = [pages([0, 0], [0, 0]), pages([0, 0], [0, 3]), pages([0, 0], [0, 0]), pages([1, 0], [0, 0])]

    fences = [JudgedFence(group, flaws, NOTHING_SEEN, "r") for group in groups]

    assert [fence.withheld() for fence in fences] == [False, True, True, True]
    assert [(bad.layer, bad.page) for bad in told] == [(1, 8)]


def test_what_was_not_converted_may_hold_anything() -> None:
    plain = Encoded(torch.zeros(4, dtype=torch.uint8))

    assert not Flaws([].append).withhold(plain)
