"""The engine that a prefill replica would start, with a small cache, driven step by step by who made it."""

import os
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.members import membership_file
from workers.api import Phase
from workers.profile.schema import parse_profile
from workers.profile.vllm_args import engine_args, engine_environment

ROOT: Final = Path(__file__).parents[2]


def small_engine(model: Path, folder: Path, engine_id: str, **changed: Any) -> Any:
    """vLLM's `LLMEngine`, its scheduler in this process.

    Args:
        folder: for sockets and the membership key.
        changed: arguments of the engine.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    profile = parse_profile(yaml.safe_load((ROOT / "deploy/models/exact.yaml").read_text()), source="exact")
    connector = {
        "engine_id": engine_id,
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": f"ipc://{folder}/gauges",
        "membership_file": membership_file(folder),
        "integrity": True,
    }
    arguments = engine_args(profile, Phase.PREFILL, str(model), engine_id, connector) | changed
    transfer = KVTransferConfig(**arguments["kv_transfer_config"])
    os.environ.update(engine_environment(profile, Phase.PREFILL, "cpu", "127.0.0.1"))
    return LLMEngine.from_engine_args(EngineArgs(**arguments | {"kv_transfer_config": transfer}))
