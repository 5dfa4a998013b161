"""One plain vLLM engine, run as a process of its own: the answers that the split path must equal.

    python -m tests.support.reference MODEL_DIR < {"prompts": [[ids]], "max_tokens": n} > {"tokens": [[ids]]}

The engine has no connector and no scheduler of ours; float32 and greedy, so that answers are exact.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def plain_answers(model_dir: Path, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[int]]:
    """Greedy continuations by one plain engine, computed in a child process that ends here."""
    ask = json.dumps({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.reference", str(model_dir)],
        input=ask,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the reference engine failed:\n{done.stderr[-3000:]}")
    answer: list[list[int]] = json.loads(done.stdout.splitlines()[-1])["tokens"]
    return answer


def main() -> None:
    from vllm import LLM, SamplingParams

    ask = json.load(sys.stdin)
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=8192,
        block_size=32,
        enforce_eager=True,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params = SamplingParams(max_tokens=ask["max_tokens"], temperature=0.0)
    # One at a time: the answer to a prompt must not depend on its neighbours' shapes.
    tokens = [
        list(llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids)
        for ids in ask["prompts"]
    ]
    sys.stdout.write("\n" + json.dumps({"tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
