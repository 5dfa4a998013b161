import pytest

from load.record import Record, failure


def test_the_first_token_is_timed_from_when_the_request_was_due_not_sent() -> None:
    record = Record(due_s=1.0, sent_s=1.5, chunk_s=(2.0, 2.5), output_tokens=2)

    assert (record.ttft_s, record.late_s) == (1.0, 0.5)


def test_the_rate_leaves_out_the_first_token_and_its_wait() -> None:
    assert Record(0.0, 0.0, (9.0, 9.5, 10.0), output_tokens=3).tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize(("chunks", "tokens"), [((1.0,), 1), ((1.0,), 5)])
def test_tokens_that_came_at_once_have_no_rate(chunks: tuple[float, ...], tokens: int) -> None:
    assert Record(0.0, 0.0, chunks, output_tokens=tokens).tokens_per_s is None


def test_a_request_with_an_error_failed() -> None:
    assert failure(0.0, 0.0, "refused").failed
