"""What was given back is remembered until it is known what became of the steps that were under way."""

from kv_transfer.integrity.parted import NOTHING, GivenBack, Parted

ROWS = [[(0, 0), (3, 103)], [(4, 104)]]
WRITTEN = [[None, 3], [None]]


def test_who_had_a_page_was_given_it_under_this_tag_or_a_later_one() -> None:
    parted = Parted()
    parted.add("a", ROWS, WRITTEN, told=False)
    parted.add("b", [[(3, 99)], []], [[3], []], told=True)

    a, b = {"a": ROWS}, {"b": [[(3, 99)], []]}
    assert [parted.who_had(3, 103), parted.who_had(4, 104), parted.who_had(3, 99)] == [a, a, a | b]
    assert [parted.who_had(3, 104), parted.who_had(5, 0)] == [{}, {}]


def test_what_was_given_back_is_taken_once_and_tells_after_which_step() -> None:
    parted = Parted()
    parted.step = 5
    parted.add("a", ROWS, WRITTEN, told=False)

    what = GivenBack(ROWS, WRITTEN, told=False, last=5)
    assert [parted.take("a"), parted.take("a"), parted.take("b")] == [what, NOTHING, NOTHING]


def test_it_is_forgotten_when_the_last_step_that_was_put_together_by_then_is_known() -> None:
    parted = Parted()
    for step in (1, 2, 3):
        parted.step = step
        parted.add(f"r{step}", ROWS, WRITTEN, told=False)
    parted.settled(2)

    assert parted.who_had(3, 103) == {"r3": ROWS}
