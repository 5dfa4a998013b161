"""Pages go to engines of the same contract only: what both ends do when an offer tells of another."""

from pathlib import Path

import msgspec
import pytest
import torch

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause
from kv_transfer.api.handoff import HandoffOutcome
from kv_transfer.protocol import messages as m
from tests.support.model_folders import DIFFERENCES, contracts
from tests.support.transfer_world import World
from tests.support.worker_pair import PROMPT, announced, asked, computed, until, worker

ROPE = Contract(rope={"theta": "10000"})


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_an_offer_of_another_contract_is_refused_and_both_ends_know_what_differs(
    tmp_path: Path, kind: str
) -> None:
    prefill, decode = contracts(tmp_path, DIFFERENCES[kind])
    world = World(sender_contract=prefill, receiver_contract=decode)

    world.start("t", pages=1)

    (outcome,) = world.outcomes()
    (failed,) = [message for message in world.heard_by_receiver if isinstance(message, m.Failed)]
    assert outcome.cause is failed.cause is TransferCause.CONTRACT_MISMATCH
    assert outcome.detail == failed.detail
    assert failed.detail.startswith(f"prefill and decode differ in {DIFFERENCES[kind].named}")
    assert world.sender.wanted() == {}
    assert world.sender.take_closed() == ["t"], "prefill keeps pages that nobody will fetch"
    assert world.quiet()


def test_an_offer_of_the_same_contract_is_served() -> None:
    world = World(sender_contract=ROPE, receiver_contract=Contract(rope={"theta": "10000"}))

    world.carry("t")

    assert [outcome.cause for outcome in world.outcomes()] == [None]


def test_an_offer_that_tells_no_contract_is_refused() -> None:
    world = World(sender_contract=ROPE)

    world.start("t")

    assert [outcome.cause for outcome in world.outcomes()] == [TransferCause.CONTRACT_MISMATCH]


def test_an_offer_that_was_parked_is_looked_at_when_its_transfer_is_announced() -> None:
    world = World(sender_contract=ROPE, receiver_contract=Contract(rope={"theta": "100000"}))
    world.ask("t")
    world.settle()
    assert world.outcomes() == []

    world.announce("t")
    world.settle()

    (outcome,) = world.outcomes()
    assert outcome.detail == "prefill and decode differ in rope: theta 10000 against 100000"


def test_an_offer_of_an_older_release_is_told_of_its_version_and_of_nothing_else() -> None:
    """Its contract is missing, which would be a puzzle."""
    world = World(sender_contract=ROPE, receiver_contract=ROPE)
    world.start("t", pages=1)
    offer = next(message for message in world.heard_by_sender if isinstance(message, m.Offer))
    raw = msgspec.msgpack.decode(m.encode(offer)) | {"transfer_id": "u", "version": m.VERSION - 1}
    del raw["contract"]
    world.announce("u")

    world.sender.on_message(b"r", m.decode_to_sender(msgspec.msgpack.encode(raw)))

    refusal = world.to_receiver.popleft()
    assert isinstance(refusal, m.Failed)
    assert (refusal.cause, refusal.detail) == (
        TransferCause.PROTOCOL,
        f"protocol version {m.VERSION - 1}, here {m.VERSION}",
    )


def test_no_byte_of_another_contract_reaches_a_cache(tmp_path: Path) -> None:
    other = Contract(rope={"theta": "100000"})
    prefill, decode = (
        worker("prefill", tmp_path, contract=ROPE),
        worker("decode", tmp_path, contract=other),
    )
    try:
        for page in (3, 4, 5):
            prefill.write(page, 1.0)
        prefill.step(announced("t"))
        decode.step(asked("t", prefill, (7, 8, 9)))
        prefill.step(computed("t", (3, 4, 5), PROMPT))
        until((prefill, decode), lambda: "d-t" in decode.received)
    finally:
        prefill.side.close()
        decode.side.close()

    report = decode.reports["d-t"]
    assert (report.outcome, report.cause) == (HandoffOutcome.RECOMPUTED, TransferCause.CONTRACT_MISMATCH)
    assert report.detail == "prefill and decode differ in rope: theta 10000 against 100000"
    assert not any(torch.any(cache) for cache in decode.caches.values())
