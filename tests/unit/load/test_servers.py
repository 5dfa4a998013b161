from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from load.servers import ServerFailed, plain_environment, plain_options, require_asked

PROFILE: dict[str, Any] = {
    "context_length": 8192,
    "block_size": 32,
    "prefill": {
        "dtype": "float32",
        "cache_gib": 3,
        "max_batched_tokens": 512,
        "max_sequences": 16,
        "threads": 5,
    },
}


def test_the_plain_server_has_the_prefill_engines_settings() -> None:
    options = plain_options(PROFILE, Path("/model"), 80)
    values = dict(pairwise(options))

    assert (values["--dtype"], values["--block-size"], values["--max-num-batched-tokens"]) == (
        "float32",
        "32",
        "512",
    )
    assert (values["--max-model-len"], values["--max-num-seqs"]) == ("8192", "16")
    assert "--enforce-eager" in options


def test_the_plain_server_has_as_many_threads_and_as_much_cache_as_prefill() -> None:
    environment = plain_environment(PROFILE)

    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("5", "3")


def test_another_profile_than_the_one_to_be_measured_is_refused() -> None:
    require_asked({"profile": {"name": "asked", "instead": None}})

    with pytest.raises(ServerFailed, match="not what was to be measured: profile other is used instead"):
        require_asked({"profile": {"name": "other", "instead": "profile other is used instead of asked"}})
