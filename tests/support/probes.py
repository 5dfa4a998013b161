"""Knocking at every port of a running system without a key, and what counts as being let in."""

import contextlib
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc
import psutil
import zmq

from kv_transfer.api import Membership, WireFormat
from kv_transfer.api.page import Layout
from kv_transfer.protocol import messages as m
from workers.api import BUS_VERSION, Frame, Item
from workers.api import bus as bus_frames

ANSWER_S: Final = 0.5
_GREETING: Final = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
_READY: Final = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

RAW: Final = {
    "http": b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "http root": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "garbage": bytes(range(256)) * 4,
    "zeros": bytes(2000),
    "redis": b"*1\r\n$4\r\nINFO\r\n*2\r\n$4\r\nKEYS\r\n$1\r\n*\r\n",
    "zeromq without keys": _GREETING + _READY + b"\x00\x05hello",
    "torch store": b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x07" + bytes(8),
}

GRPC_METHODS: Final = (
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.serve.ASGIService/HandleRequest",
)
_KEPT_OUT: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,  # it speaks no gRPC at all
    grpc.StatusCode.UNIMPLEMENTED,  # it does, but not this
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


@dataclass(frozen=True)
class Listener:
    port: int
    process: str


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    """Every TCP port that one of them listens on."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline()[:3])[-60:] or process.name()
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = Listener(connection.laddr.port, name)
    return sorted(found.values(), key=lambda listener: listener.port)


def other_addresses() -> set[str]:
    """This machine's addresses but the one that the system binds."""
    found = {
        address.address.split("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return (found | {"127.0.0.2", "::1"}) - {"127.0.0.1"}


def raw_answer(port: int, data: bytes) -> bytes:
    """All that comes back within a moment, at most 64 KiB."""
    got = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection,
    ):
        connection.sendall(data)
        while len(got) < 65536 and (part := connection.recv(4096)):
            got += part
    return got


def lets_in(answer: bytes) -> bool:
    """Whether this is more than a greeting or a refusal."""
    if not answer:
        return False
    if status := re.match(rb"HTTP/1\.[01] (\d{3})", answer):
        return int(status[1]) < 400
    if answer.startswith(_GREETING[:10]):
        return b"\x05READY" in answer
    if answer.startswith(b"-"):
        return any(line and not line.startswith(b"-") for line in answer.split(b"\r\n"))
    return not _only_http2_control(answer)


def _only_http2_control(answer: bytes) -> bool:
    """Settings, ping, goodbye, window: what an HTTP/2 server says to anybody."""
    while answer:
        length, kind = int.from_bytes(answer[:3]), answer[3:4]
        if len(answer) < 9 + length or kind not in (b"\x04", b"\x06", b"\x07", b"\x08"):
            return False
        answer = answer[9 + length :]
    return True


def grpc_code(port: int, method: str, token: str | None) -> grpc.StatusCode | None:
    """How the call without a body ends; None: it was answered."""
    metadata = [("authorization", f"Bearer {token}")] if token is not None else None
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=1.0, metadata=metadata)
        except grpc.RpcError as refused:
            code: grpc.StatusCode = refused.code()
            return code
    return None


def kept_out(code: grpc.StatusCode | None) -> bool:
    return code in _KEPT_OUT


def well_formed_frames() -> Iterator[bytes]:
    """What members say to each other."""
    layout = Layout(layers=1, heads=1, block_size=16, content=8, format=WireFormat.FP32, interior="x")
    link = m.LinkAddress(link_id="0" * 32, host="127.0.0.1", port=9, backend="gloo")
    yield m.encode(m.CountRequest())
    yield m.encode(m.Release(transfer_id="0" * 32))
    yield m.encode(
        m.Offer(
            version=m.VERSION,
            transfer_id="0" * 32,
            engine_id="0" * 32,
            to_engine="0" * 32,
            layout=layout,
            first_page=0,
            pages=1,
            link=link,
        )
    )
    item = Item(request_id="0" * 32, attempt=0, first_index=0, token_ids=(1,))
    yield bus_frames.encode(Frame(version=BUS_VERSION, engine_id="0" * 32, items=(item,)))


def answers_a_stranger(port: int) -> bool:
    """Whether anything comes back for well-formed frames under a key that is not the system's."""
    stranger = Membership.mint()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        stranger.client(dealer)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for frame in well_formed_frames():
            with contextlib.suppress(zmq.Again):  # a socket that was turned away has no queue left
                dealer.send(frame, zmq.NOBLOCK)
        return bool(dealer.poll(ANSWER_S * 1000))
