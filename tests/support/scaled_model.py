"""A tiny model with scales of its own: measured, or loaded as a decode worker with an FP8 cache loads it.

python -m tests.support.scaled_model FOLDER      measures it twice; one JSON object out
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from kv_transfer.api import scale_file_sha256
from tests.support.members import membership_file
from tests.support.tiny_model import VOCABULARY, random_llama
from workers.api import Phase
from workers.engine.ranges import measure
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import engine_args, engine_environment

PROMPTS = [[(7 * i * i + 3 * n) % (VOCABULARY - 3) + 3 for i in range(40 + n)] for n in range(3)]


def tiny_profile(model: Path) -> ModelProfile:
    raw = {
        "name": "tiny",
        "model_id": "tiny",
        "weights": {"path": str(model)},
        "context_length": 256,
        "prefill": {"dtype": "float32"},
        "decode": {"dtype": "float32", "kv_format": "fp8_e4m3"},
    }
    return parse_profile(raw, source="tiny")


def by_transformers(model: Path) -> list[tuple[float, float]]:
    """What a cache of Hugging Face's holds, by layer: largest key, and value."""
    import torch
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen = [(0.0, 0.0)] * llama.config.num_hidden_layers
    for ids in PROMPTS:
        with torch.inference_mode():
            cache = llama(torch.tensor([ids]), use_cache=True).past_key_values
        found = [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers]
        seen = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(seen, found, strict=True)]
    return seen


def loaded_layers(model: Path, folder: Path, scales: Path) -> dict[str, Any]:
    """vLLM's attention layers of a decode worker that has its weights, in this process.

    The worker goes no further: vLLM looks at the processor when it makes an FP8 cache.
    """
    profile = tiny_profile(model)
    os.environ.update(engine_environment(profile, Phase.DECODE, "cpu", "127.0.0.1"))
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    connector = {
        "engine_id": "e" * 32,
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": f"ipc://{folder}/gauges",
        "membership_file": membership_file(folder),
        "scale_file": str(scales),
        "scale_sha256": scale_file_sha256(scales),
        "rounded_writes": True,
    }
    arguments = engine_args(profile, Phase.DECODE, str(model), "e" * 32, connector)
    transfer = KVTransferConfig(**arguments["kv_transfer_config"])
    config = EngineArgs(**arguments | {"kv_transfer_config": transfer}).create_engine_config()
    UniProcExecutor(config)
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    return layers


def main() -> None:
    model = random_llama(Path(sys.argv[1]))
    seen = measure(tiny_profile(model), str(model), PROMPTS, device="cpu")
    told = {"measured": seen, "transformers": by_transformers(model)}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
