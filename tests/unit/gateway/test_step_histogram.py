from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.step_histogram import StepHistogram

BUCKETS = (0.001, 0.02, 0.5, 1, 10)


def page(*values: float) -> bytes:
    registry = CollectorRegistry()
    histogram = StepHistogram("gap_seconds", "A gap.", BUCKETS)
    registry.register(histogram)
    for value in values:
        histogram.observe(value)
    return generate_latest(registry)


def library_page(*values: float) -> bytes:
    registry = CollectorRegistry()
    histogram = Histogram("gap_seconds", "A gap.", buckets=BUCKETS, registry=registry)
    for value in values:
        histogram.observe(value)
    text = generate_latest(registry)
    return b"".join(line for line in text.splitlines(keepends=True) if b"_created" not in line)


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(BUCKETS))))
def test_the_page_is_that_of_the_librarys_histogram(values: list[float]) -> None:
    assert page(*values) == library_page(*values)
