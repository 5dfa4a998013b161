"""Turns a quantised GGUF file into a folder of BF16 safetensors, tokenizer and chat template.

Run as a process of its own (`python -m deploy.gguf_conversion GGUF FOLDER`): torch and transformers stay
out of the command that shows the progress. Prints one line as each stage begins.
"""

import sys
from pathlib import Path
from typing import Final

STAGES: Final = ("loading libraries", "dequantising", "writing weights", "writing tokenizer")


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model into an existing, empty folder."""
    stages = iter(STAGES)

    def begin() -> None:
        sys.stdout.write(f"{next(stages)}\n")
        sys.stdout.flush()

    begin()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    begin()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now; engines would try to unpack them

    begin()
    model.save_pretrained(str(folder))
    begin()
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
