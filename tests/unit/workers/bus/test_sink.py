import pytest
import zmq

from tests.support.members import MEMBERSHIP
from tests.support.relay import Relay
from tests.support.stack import eventually
from workers.bus import sink as sink_module
from workers.bus.sink import ZmqSink


def test_frames_arrive_in_order_and_the_sink_knows_that_its_gateway_is_there() -> None:
    context = zmq.Context()
    gate = MEMBERSHIP.gate(context)
    pull = context.socket(zmq.PULL)
    MEMBERSHIP.server(pull)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    sink = ZmqSink(f"tcp://127.0.0.1:{port}", membership=MEMBERSHIP)
    try:
        assert sink.send(b"one")
        assert sink.send(b"two")
        assert [pull.recv(), pull.recv()] == [b"one", b"two"]
        assert sink.connected()
    finally:
        sink.close()
        pull.close(linger=0)
        gate.stop()
        context.term()


def test_a_queue_without_a_reader_fills_up_and_send_never_waits() -> None:
    sink = ZmqSink("tcp://127.0.0.1:9", membership=MEMBERSHIP, queued_frames=10)
    try:
        accepted = [sink.send(b"x") for _ in range(20)]
        assert accepted == [True] * 10 + [False] * 10
        assert not sink.connected()
    finally:
        sink.close()


def test_a_gateway_whose_machine_stops_is_not_connected_though_its_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "_KEEPALIVE_MS", 50)
    context = zmq.Context()
    gate = MEMBERSHIP.gate(context)
    pull = context.socket(zmq.PULL)
    MEMBERSHIP.server(pull)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with Relay("127.0.0.1", port) as relay:
        sink = ZmqSink(f"tcp://127.0.0.1:{relay.port}", membership=MEMBERSHIP)
        try:
            assert sink.send(b"one")
            assert pull.recv() == b"one"
            assert sink.connected()
            relay.fall_silent()
            eventually(sink.connected, lambda connected: not connected, within_s=10)
        finally:
            sink.close()
            pull.close(linger=0)
            gate.stop()
            context.term()
