"""What is asked of a cell that was played four times: calm and with the fault, with integrity on and off."""

from kv_transfer.api.faults import FaultPhase
from tests.support.cell_words import Answer, Played
from tests.support.page_cells import Cell

IN_TRANSFER = (FaultPhase.SEND, FaultPhase.RECEIVE)
NEAR = 1e-4
"""Log-probs of one text that was computed in other pieces."""


def is_calm(played: Played) -> None:
    assert played.died == ""
    assert (played.landed, played.mismatches) == ({}, {})
    assert {answer.reason for answer in played.answers.values()} == {"length"}
    is_balanced(played)


def is_balanced(played: Played) -> None:
    assert (played.missing, played.referenced, played.remembered) == (0, 0, 0)


def is_seen(cell: Cell, calm: Played, played: Played) -> None:
    """With integrity on."""
    assert played.died == ""
    assert played.landed.keys() == {"fault0"}, "never let loose"
    assert {r: a.cause for r, a in played.answers.items() if a.cause} == dict(cell.ends)
    assert played.mismatches == dict(cell.counted)
    assert played.answers.keys() == calm.answers.keys()
    for name, answer in played.answers.items():
        right = calm.answers[name]
        if name in cell.ends:
            assert answer.reason == "error"
            assert answer.tokens == right.tokens[: len(answer.tokens)]
            assert answer.logprobs == right.logprobs[: len(answer.logprobs)]
            assert len(answer.tokens) < len(right.tokens)
        elif cell.handoff and name == "d":
            answers_right(answer, right)
            assert (answer.handoff, right.handoff) == (cell.handoff, "shipped")
        elif cell.recomputed and name == cell.victim:
            answers_right(answer, right)
        else:
            assert answer == right, name
    is_balanced(played)


def answers_right(answer: Answer, right: Answer) -> None:
    assert (answer.tokens, answer.reason) == (right.tokens, "length")
    assert max(abs(a - b) for a, b in zip(answer.logprobs, right.logprobs, strict=True)) < NEAR


def has_landed(cell: Cell, calm: Played, played: Played) -> None:
    """With integrity off, the same fault changes what the kernels get, and what is answered."""
    assert played.landed.keys() == {"fault0"}, "never let loose"
    assert played.mismatches == (cell.counted if cell.always_refused else {})
    if cell.harmless:
        assert played.steps == calm.steps
        assert played.answers == calm.answers
    elif cell.always_refused:
        assert played.answers["d"].handoff == cell.handoff
    elif not played.died:
        # Of a transfer nobody can say in which step its pages come: tables differ anyhow.
        assert cell.phase in IN_TRANSFER or played.steps != calm.steps
        assert played.answers != calm.answers, "no log-prob moved"
