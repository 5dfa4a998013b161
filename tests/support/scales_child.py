"""What engines of a tiny model say of their keys, values and scales, in a process of their own.

    python -m tests.support.scales_child FOLDER      one JSON object out

Measures the model in one engine, writes a scale file of it, and loads the model again as a decode worker with
an FP8 cache would. That worker stops where vLLM looks at the processor: after loading, before the cache.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kv_transfer.api import LayerScales, ScaleFile, WireFormat, encode_scale_file, scale_file_sha256
from tests.support.members import membership_file
from tests.support.tiny_model import VOCABULARY, random_llama
from workers.api import Phase
from workers.engine.ranges import measure
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import engine_args

PROMPTS = [[(7 * i * i + 3 * n) % (VOCABULARY - 3) + 3 for i in range(40 + n)] for n in range(3)]


def a_profile(model: Path) -> ModelProfile:
    phase = {"dtype": "float32"}
    raw = {
        "name": "tiny",
        "model_id": "tiny",
        "weights": {"path": str(model)},
        "context_length": 256,
        "prefill": phase,
        "decode": phase | {"kv_format": "fp8_e4m3"},
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


def loaded(profile: ModelProfile, model: Path, folder: Path, scales: Path) -> dict[str, Any]:
    """The layers of a decode worker that has its weights."""
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
    layers = config.compilation_config.static_forward_context
    return {
        name: [layer._k_scale_float, layer._v_scale_float, type(layer.impl).__name__]
        for name, layer in layers.items()
    }


def main() -> None:
    folder = Path(sys.argv[1])
    model = random_llama(folder / "model")
    profile = a_profile(model)
    seen = measure(profile, str(model), PROMPTS, device="cpu")
    scales = folder / "scales.json"
    layers = tuple(LayerScales(name=name, k=k / 7, v=v / 3) for name, (k, v) in seen.items())
    file = ScaleFile(version=1, format=WireFormat.FP8_E4M3, source_revision=None, layers=layers)
    scales.write_bytes(encode_scale_file(file))
    told = {
        "measured": list(seen.values()),
        "transformers": by_transformers(model),
        "file": {layer.name: [layer.k, layer.v] for layer in layers},
        "loaded": loaded(profile, model, folder, scales),
    }
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
