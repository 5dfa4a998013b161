"""A peer that is gone is noticed, one that is there is not suspected."""

import time
from collections.abc import Iterator

import pytest
import zmq

from kv_transfer.connector import peers as peers_module
from kv_transfer.connector.peers import CONNECT_S, Peers
from kv_transfer.protocol import messages as m
from tests.support.clock import FakeClock
from tests.support.members import MEMBERSHIP
from tests.support.relay import Relay

ABORT = m.Abort(transfer_id="t", engine_id="e")


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def peers(context: "zmq.Context[zmq.Socket[bytes]]", clock: FakeClock) -> Iterator[Peers]:
    peers = Peers(context, MEMBERSHIP, zmq.Poller(), clock.now)
    yield peers
    peers.close()


class Worker:
    """A prefill worker's control socket."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._gate = MEMBERSHIP.gate(self._context)
        self.router = self._context.socket(zmq.ROUTER)
        MEMBERSHIP.server(self.router)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"

    def hear(self) -> m.ToSender:
        assert self.router.poll(5000)
        self.route, data = self.router.recv_multipart()
        return m.decode_to_sender(data)

    def die(self) -> None:
        self.router.close(linger=0)
        self._gate.stop()
        self._context.term()


def lost_within(peers: Peers, looks: int) -> list[str]:
    for _ in range(looks):
        if lost := peers.take_lost():
            return lost
        time.sleep(0.01)
    return []


def test_messages_go_both_ways_and_a_living_peer_is_never_lost(peers: Peers, clock: FakeClock) -> None:
    worker = Worker()
    peers.tell(worker.address, ABORT)
    assert worker.hear() == ABORT
    worker.router.send_multipart([worker.route, m.encode(m.Drained(transfer_id="t"))])

    got = []
    while not got:
        got = list(peers.heard())
    clock.jump(CONNECT_S * 10)

    assert got == [(worker.address, m.Drained(transfer_id="t"))]
    assert peers.take_lost() == []
    worker.die()


def test_a_peer_that_dies_is_lost_once_and_forgotten(peers: Peers) -> None:
    worker = Worker()
    peers.tell(worker.address, ABORT)
    worker.hear()
    worker.die()

    assert lost_within(peers, 500) == [worker.address]
    assert peers.take_lost() == []
    assert len(peers) == 0


def test_a_peer_whose_machine_stops_is_lost_though_its_connection_stays(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(peers_module, "SILENCE_MS", 200)
    worker = Worker()
    try:
        with Relay("127.0.0.1", worker.port) as relay:
            address = f"tcp://127.0.0.1:{relay.port}"
            peers.tell(address, ABORT)
            worker.hear()
            assert lost_within(peers, 60) == []  # heartbeats are answered, though nothing else is said
            relay.fall_silent()

            assert lost_within(peers, 500) == [address]
    finally:
        worker.die()


def test_a_peer_that_never_answers_is_lost_after_a_while_and_not_before(
    peers: Peers, clock: FakeClock
) -> None:
    nobody = "tcp://127.0.0.1:9"
    peers.tell(nobody, ABORT)

    clock.jump(CONNECT_S - 0.1)
    assert peers.take_lost() == []
    clock.jump(0.2)
    assert peers.take_lost() == [nobody]
