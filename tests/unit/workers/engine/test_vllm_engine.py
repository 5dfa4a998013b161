import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api import HandoffOutcome, HandoffReport
from workers.engine.vllm_engine import local_hit

BLOCK = 16


def test_without_a_transfer_every_cached_token_is_an_own_hit() -> None:
    assert local_hit(48, None, BLOCK) == 48
    assert local_hit(47, HandoffReport(outcome=HandoffOutcome.NOTHING_MISSING), BLOCK) == 47


def test_a_failed_transfer_claims_no_hit() -> None:
    assert local_hit(48, HandoffReport(outcome=HandoffOutcome.RECOMPUTED), BLOCK) == 0


@pytest.mark.parametrize("last_page_used", [1, 15, 16])
@given(own=st.integers(0, 20), came=st.integers(1, 20))
def test_pages_that_came_are_not_own_hits(last_page_used: int, own: int, came: int) -> None:
    cached = (own + came - 1) * BLOCK + last_page_used
    report = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=came)

    assert local_hit(cached, report, BLOCK) == own * BLOCK
