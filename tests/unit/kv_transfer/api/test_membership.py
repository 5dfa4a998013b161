"""Sockets speak to members only."""

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kv_transfer.api import Membership
from tests.support.members import MEMBERSHIP

Server = tuple["zmq.Socket[bytes]", str, list[None]]


@pytest.fixture
def server() -> Iterator[Server]:
    """A ROUTER for members, its address, and how many strangers were refused."""
    refused: list[None] = []
    context = zmq.Context()
    gate = MEMBERSHIP.gate(context, lambda: refused.append(None))
    router = context.socket(zmq.ROUTER)
    MEMBERSHIP.server(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    yield router, f"tcp://127.0.0.1:{port}", refused
    router.close(linger=0)
    gate.stop()
    context.term()


def heard(router: "zmq.Socket[bytes]", address: str, prepare: object, within_ms: int) -> bool:
    """Whether a message from a client prepared so arrives."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        prepare(dealer)  # type: ignore[operator]
        dealer.connect(address)
        dealer.send(b"hello")
        if not router.poll(within_ms):
            return False
        return router.recv_multipart()[1:] == [b"hello"]


def test_a_member_is_heard(server: Server) -> None:
    router, address, refused = server

    assert heard(router, address, MEMBERSHIP.client, 5000)
    assert refused == []


def test_a_client_with_a_key_of_its_own_is_refused_though_it_knows_the_servers(server: Server) -> None:
    router, address, refused = server
    own, stranger = MEMBERSHIP, Membership.mint()

    def half_a_member(dealer: "zmq.Socket[bytes]") -> None:
        dealer.curve_serverkey = own.public
        dealer.curve_publickey, dealer.curve_secretkey = stranger.public, stranger.secret

    assert not heard(router, address, half_a_member, 300)
    assert len(refused) == 1
    assert heard(router, address, MEMBERSHIP.client, 5000)


def test_a_client_of_another_system_and_one_without_keys_are_not_heard(server: Server) -> None:
    router, address, _ = server

    assert not heard(router, address, Membership.mint().client, 200)
    assert not heard(router, address, lambda dealer: None, 200)
    assert heard(router, address, MEMBERSHIP.client, 5000)


def test_garbage_gets_no_answer_beyond_the_greeting_and_harms_nobody(server: Server) -> None:
    router, address, _ = server
    port = int(address.rsplit(":", 1)[1])
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 500, greeting + b"\x03" * 500):
        got = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=0.3) as raw,
        ):
            raw.sendall(data)
            while part := raw.recv(1000):
                got += part
        assert len(got) <= 64 + 10, "a ZeroMQ greeting has 64 bytes"

    assert heard(router, address, MEMBERSHIP.client, 5000)


def test_a_server_without_a_gate_takes_nobody() -> None:
    """A context in which nobody decides must not be open to all."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        MEMBERSHIP.server(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        assert not heard(router, f"tcp://127.0.0.1:{port}", MEMBERSHIP.client, 300)


def test_the_key_survives_a_private_file_and_shows_in_no_printout(tmp_path: Path) -> None:
    path = tmp_path / "membership"
    MEMBERSHIP.write(path)

    assert Membership.read(path) == MEMBERSHIP
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for key in (MEMBERSHIP.public, MEMBERSHIP.secret):
        assert key.decode() not in f"{MEMBERSHIP!r} {MEMBERSHIP}"
    with pytest.raises(ValueError, match="40 characters"):
        Membership.decode(Membership(b"short", b"keys").encode())
