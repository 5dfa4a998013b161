"""Mixed load for half an hour: right answers all the time, and no process grows."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import ANSWER_TOKENS, Answers, Texts
from tests.support.aborts import await_idle, footprints
from tests.support.prompts import exact_texts
from tests.support.reference import plain_answers
from tests.support.soak import Known, Load, Watch, report
from tests.support.stack import Stack

MINUTES = float(os.environ.get("PHASEGATE_SOAK_MINUTES", "30"))
WARM_UP_SHARE = 0.5
"""Of the time: pools of threads and connections fill, and caches reach their bounds. The slowest is oneDNN's,
in the prefill engine: it takes in one new length of a prompt at a time."""
LONGER = (300, 700)
BEGINNINGS = (96, 200, 450)
RESULT = Path(__file__).parents[2] / "docs" / "results" / "soak.json"

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(MINUTES * 60 + 900)]


@pytest.fixture(scope="module")
def known(model_dir: Path, texts: Texts, answers: Answers) -> list[Known]:
    """Prompts around page sizes, two longer ones, and beginnings of the longest: their pages are shared."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    longer = exact_texts(model_dir, LONGER)
    whole = longer[max(LONGER)][1]
    beginnings = [whole[:length] for length in BEGINNINGS]
    more = [
        *longer.values(),
        *((tokenizer.decode(ids, skip_special_tokens=False), ids) for ids in beginnings),
    ]
    assert all(tokenizer.encode(text, add_special_tokens=False).ids == ids for text, ids in more)
    found = plain_answers(model_dir, [ids for _, ids in more], max_tokens=ANSWER_TOKENS)
    pairs = [(texts[length][0], answers[length]) for length in texts]
    pairs += [(text, ids) for (text, _), ids in zip(more, found, strict=True)]
    return [Known(text, tokenizer.decode(ids, skip_special_tokens=True), len(ids)) for text, ids in pairs]


def test_a_soak_gives_no_wrong_answer_and_no_process_grows(
    stack: Stack, known: list[Known], tmp_path: Path
) -> None:
    # A short run says that the measurement works; only a long one can tell a leak from noise.
    bound = 1.0 if MINUTES >= 20 else 20.0
    warm_min = MINUTES * WARM_UP_SHARE
    load = Load(stack, known, seed=7)
    with Watch(stack) as watch:
        load.run(warm_min * 60)
        await_idle(stack, None)
        baseline = footprints(stack)
        load.run((MINUTES - warm_min) * 60)
    await_idle(stack, baseline)

    found = report(load, watch, MINUTES, warm_min, bound)
    (RESULT if MINUTES >= 20 else tmp_path / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    growing = [row for row in found["processes"] if row["growth_mib_per_min"] > bound]
    assert load.wrong == []
    assert min(load.counts.values()) > MINUTES
    assert growing == []
    assert watch.came == []
    assert len(found["processes"]) >= 6
