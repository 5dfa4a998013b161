"""Leads an engine along known continuations, and writes down what it would have said.

vLLM loads `Forced` in the engine's process. A request names a file and its row in it; the rows of a file are
written by one engine. Log-probabilities are of the model's own logits, before anything is forced.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY: Final = "phasegate_trial"
"""Of the sampling parameters' `extra_args`: the fields of a `Lead`, as a mapping."""
FIELDS: Final = ("dlogprob", "kl", "same_argmax")


class Lead:
    """One request's way."""

    def __init__(self, reference: str, notes: str, row: int, force: list[int]) -> None:
        """
        Args:
            reference: file of float32 [rows, tokens, vocabulary].
            notes: file of float64 [rows, tokens, FIELDS]; empty: this request writes the reference.
            force: the continuation; empty: the engine's own choice.
        """
        self._reference = np.load(reference, mmap_mode="r+")[row]
        self._notes = np.load(notes, mmap_mode="r+")[row] if notes else None
        self._force = force

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        step = len(output_ids)
        found = torch.log_softmax(logits.double(), dim=-1)
        if self._notes is None:
            self._reference[step] = found.numpy()
            return logits
        token = self._force[step]
        self._notes[step] = compare(torch.from_numpy(self._reference[step]).double(), found, token)
        forced = torch.full_like(logits, float("-inf"))
        forced[token] = logits[token]
        return forced


class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Lead | None:
        told = (params.extra_args or {}).get(KEY)
        return None if told is None else Lead(**told)


def compare(reference: torch.Tensor, found: torch.Tensor, token: int) -> tuple[float, float, float]:
    """In the order of FIELDS.

    Args:
        reference, found: log-probabilities, float64 [vocabulary].
    """
    return (
        float((found[token] - reference[token]).abs()),
        float((reference.exp() * (reference - found)).sum()),
        float(found.argmax() == reference.argmax()),
    )


def new_file(path: Path, shape: tuple[int, ...], dtype: type) -> None:
    """Not-a-numbers: what was not written is seen."""
    file: Any = np.lib.format
    file.open_memmap(path, mode="w+", dtype=dtype, shape=shape)[:] = np.nan
