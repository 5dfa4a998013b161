"""The worker that our engines start sets the scales of its file when it has the weights, and rounds."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_transfer.api import LayerScales, ScaleFile, WireFormat, encode_scale_file
from kv_transfer.connector.facade import scales_of
from kv_transfer.connector.rounded import RoundedImpl
from tests.support.scaled_model import loaded_layers
from tests.support.tiny_model import random_llama

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning")]  # vLLM's own

SCALES = {"model.layers.0.self_attn.attn": (0.5, 0.125), "model.layers.1.self_attn.attn": (0.3, 2.0)}


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Of a worker in this process, which is as it was afterwards."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    file = ScaleFile(
        version=1,
        format=WireFormat.FP8_E4M3,
        source_revision=None,
        layers=tuple(LayerScales(name=name, k=k, v=v) for name, (k, v) in SCALES.items()),
    )
    scales = tmp_path / "scales.json"
    scales.write_bytes(encode_scale_file(file))
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM's worker replaces it
    environment = dict(os.environ)
    try:
        yield loaded_layers(random_llama(tmp_path / "model"), tmp_path, scales)
    finally:
        cleanup_dist_env_and_memory()
        AttentionBackendEnum.CPU_ATTN.clear_override()
        os.environ.clear()
        os.environ.update(environment)


def test_a_loaded_worker_has_the_scales_of_its_file_and_the_rounding_backend(layers: dict[str, Any]) -> None:
    assert {name: (layer._k_scale_float, layer._v_scale_float) for name, layer in layers.items()} == SCALES
    assert [layer._v_scale.item() for layer in layers.values()] == [0.125, 2.0]
    assert scales_of(layers.values()) == tuple(SCALES.values())
    assert {type(layer.impl) for layer in layers.values()} == {RoundedImpl}
