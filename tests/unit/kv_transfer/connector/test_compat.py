"""The start-up check of what we override in vLLM."""

import pytest

from kv_transfer.connector.compat import TESTED, UntestedVllm, digest_of, require_tested


def test_the_installed_vllm_is_the_tested_one() -> None:
    require_tested()

    assert all(digest_of(name) for name in TESTED)


def test_a_part_that_differs_or_is_gone_is_named_with_the_way_out() -> None:
    tested = {
        "core.block_pool:BlockPool": "0" * 16,
        "core.block_pool:Gone": TESTED["core.block_pool:BlockPool"],
    }

    with pytest.raises(
        UntestedVllm, match=r"core.block_pool:BlockPool, core.block_pool:Gone.*integrity: off"
    ):
        require_tested(tested)
