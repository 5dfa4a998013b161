"""Prefill in BF16, decode with an FP8 cache: how far probabilities move, and that wrong scales would show.

The pages go between two real engines; the reference is the same model in float32, in another implementation.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml

from load import accuracy
from load.accuracy import OURS
from load.engine_process import TRIALS, EngineProcess, engine_process
from load.formats import chats
from tests.support.processor import lack
from workers.trials.forced import new_file

PROMPTS, TOKENS = 10, 12
BOUND = 0.1
"""Of the mean absolute difference of a log-probability, in nats."""
BASE = yaml.safe_load((Path(__file__).parents[2] / "deploy/models/smollm2-135m.yaml").read_text())
PROFILE = accuracy.profile_of(BASE, OURS, 1, None)
SHORT = lack(PROFILE)

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(SHORT), reason=SHORT)]


@pytest.fixture(scope="module")
def engines(model_dir: Path) -> Iterator[EngineProcess]:
    start = {"profile": PROFILE, "model": str(model_dir), "pair": True}
    with engine_process(start, threads=1, cache_gib=1, program=TRIALS) as engines:
        yield engines


@pytest.fixture(scope="module")
def order(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Along what float32 answers, with what float32 finds probable."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = chats(str(model_dir), accuracy.questions(PROMPTS))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    reference = tmp_path_factory.mktemp("formats") / "reference.npy"
    new_file(reference, (PROMPTS, TOKENS, model.config.vocab_size), np.float32)
    rows = np.load(reference, mmap_mode="r+")
    continuations = []
    for row, prompt in zip(rows, prompts, strict=True):
        answered = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        row[:] = torch.cat(answered.logits).log_softmax(-1).numpy()
        continuations.append(answered.sequences[0, len(prompt) :].tolist())
    return {
        "type": "Score",
        "prompts": prompts,
        "tokens": TOKENS,
        "concurrency": 4,
        "reference": str(reference),
        "continuations": continuations,
    }


@pytest.mark.timeout(300)
def test_probabilities_move_little_and_wrong_scales_on_one_side_would_show(
    engines: EngineProcess, order: dict[str, Any]
) -> None:
    scored = engines.ask(order)

    assert [row["outcome"] for row in scored] == ["shipped"] * PROMPTS
    assert [list(row["continuation"]) for row in scored] == order["continuations"]
    assert mean(scored, "dlogprob") < BOUND
    assert mean(scored, "kl") < BOUND / 2

    assert engines.ask({"type": "Skew", "factor": 2.0}) == BASE["geometry"]["num_hidden_layers"]
    wrong = engines.ask(order)

    assert mean(wrong, "dlogprob") > 2 * BOUND
    assert mean(wrong, "kl") > BOUND


def mean(scored: list[dict[str, Any]], name: str) -> float:
    return fmean(fmean(row[name]) for row in scored)
