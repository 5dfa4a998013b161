from hypothesis import given
from hypothesis import strategies as st

from workers.pools.history import KEEP_ENDED_S, TokenHistory


def test_a_new_attempt_hides_the_tokens_of_the_old_one() -> None:
    history = TokenHistory(lambda: 0.0)
    old = history.begin("r")
    old.extend([1, 2, 3])
    new = history.begin("r")
    new.append(7)

    history.end("r", old)

    assert history.since("r", 0) == (7,)


def test_the_oldest_ended_requests_go_first() -> None:
    history = TokenHistory(lambda: 0.0, keep_ended=2)
    for name in ("a", "b", "c"):
        history.end(name, history.begin(name))

    assert [history.since(name, 0) for name in ("a", "b", "c")] == [None, (), ()]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=20))
def test_an_ended_request_is_known_for_exactly_its_time(steps: list[tuple[str, float]]) -> None:
    now = 0.0
    history = TokenHistory(lambda: now)
    ended: dict[str, float] = {}
    for name, pause in steps:
        history.end(name, history.begin(name))
        ended[name] = now
        now += pause
        for known, at in ended.items():
            assert (history.since(known, 0) is not None) == (now < at + KEEP_ENDED_S)
