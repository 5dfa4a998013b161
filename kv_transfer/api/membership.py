"""Who may speak on the ZeroMQ sockets inside a system: whoever holds its membership key.

One CURVE key pair for each running system, made at its start. Servers prove with it that they belong to the
system, and take no client that does not prove the same; what is said is encrypted. Members are not told
apart: what one may ask of another is guarded by capabilities (transfer ids), not by names.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

if TYPE_CHECKING:
    import zmq

_DOMAIN: Final = "phasegate"

log = logging.getLogger(__name__)


class Gate(Protocol):
    """Decides, in a thread of its own, which clients a context's servers take."""

    def stop(self) -> None:
        """Before the context ends. Idempotent."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The key pair, as 40 characters of Z85 each."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def mint(cls) -> "Membership":
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    def client(self, socket: "zmq.Socket[Any]") -> None:
        """Call before `connect`: the socket speaks to members only, and as a member."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def server(self, socket: "zmq.Socket[Any]") -> None:
        """Call before `bind`. The socket's context needs a `gate`; without one it takes nobody."""
        socket.curve_server = True
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.zap_domain = _DOMAIN.encode()
        socket.zap_enforce_domain = 1

    def gate(self, context: "zmq.Context[Any]", refused: Callable[[], None] | None = None) -> Gate:
        """Start to let members in on this context's servers; `refused` is called for each stranger."""
        import zmq
        from zmq.auth.thread import ThreadAuthenticator

        gate = ThreadAuthenticator(zmq.Context.shadow(context.underlying))
        gate.configure_curve_callback(_DOMAIN, _OnlyMembers(self.public, refused))
        gate.start()
        return gate

    def write(self, path: Path) -> None:
        """For a child process: a new file that only its owner can read."""
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self.encode())

    @classmethod
    def read(cls, path: Path) -> "Membership":
        """Raises OSError when there is no such file, ValueError when it holds no key."""
        return cls.decode(path.read_bytes())

    def encode(self) -> bytes:
        return msgspec.msgpack.encode((self.public, self.secret))

    @classmethod
    def decode(cls, data: bytes) -> "Membership":
        """Raises ValueError when this is no key."""
        public, secret = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
        if len(public) != 40 or len(secret) != 40:
            raise ValueError("a membership key has 40 characters each")
        return cls(public, secret)


class _OnlyMembers:
    """The form in which pyzmq wants to ask."""

    def __init__(self, public: bytes, refused: Callable[[], None] | None) -> None:
        self._public = public
        self._refused = refused

    def callback(self, _domain: str, key: bytes) -> bool:
        if key == self._public:
            return True
        log.warning("a client without the membership key was refused")
        if self._refused is not None:
            self._refused()
        return False
