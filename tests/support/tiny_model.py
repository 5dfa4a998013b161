"""Llamas of two layers with random weights, small enough that an engine starts in seconds.

Weights are wide enough that what is read through a block table decides the next token.
"""

from pathlib import Path
from typing import Final

import torch

VOCABULARY: Final = 1024


def random_llama(folder: Path, *, seed: int = 11) -> Path:
    """A folder with safetensors and configuration, no tokenizer. Heads divide by two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
