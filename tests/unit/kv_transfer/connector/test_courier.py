"""The courier's own counts, over real sockets."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from kv_transfer.api import Membership
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.courier import Courier
from kv_transfer.protocol import messages as m
from tests.support.transfer_world import LAYOUT


@pytest.fixture
def membership() -> Membership:
    return Membership.mint()


@pytest.fixture
def courier(tmp_path: Path, membership: Membership) -> Iterator[Courier]:
    membership.write(tmp_path / "membership")
    config = ConnectorConfig(
        engine_id="e",
        bind_host="127.0.0.1",
        backend="gloo",
        gauges_endpoint="",
        membership_file=str(tmp_path / "membership"),
    )
    courier = Courier(config, rank=0, layout=LAYOUT, device=torch.device("cpu"))
    yield courier
    courier.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def counted(socket: "zmq.Socket[bytes]") -> m.Count:
    socket.send(m.encode(m.CountRequest()))
    assert socket.poll(5000)
    answer = m.decode_to_receiver(socket.recv())
    assert isinstance(answer, m.Count)
    return answer


def test_what_is_no_message_and_who_is_no_member_are_counted(
    courier: Courier, membership: Membership, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    with context.socket(zmq.DEALER) as member, context.socket(zmq.DEALER) as stranger:
        membership.client(member)
        Membership.mint().client(stranger)
        stranger.curve_serverkey = membership.public
        member.connect(courier.address)
        assert counted(member) == m.Count(in_flight=0)

        member.send(b"\xc1 no message")
        member.send_multipart([b"two", b"frames"])
        stranger.connect(courier.address)
        deadline = time.monotonic() + 15
        while (count := counted(member)).strangers == 0 and time.monotonic() < deadline:
            time.sleep(0.01)

    assert count.malformed == 2
    assert count.strangers >= 1  # a stranger tries again
