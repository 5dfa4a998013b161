"""Where two workers meet: a store that lives only while their group is built."""

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """A listening socket bound before its address is told to anybody: no other process can take it."""

    listener: socket.socket
    host: str
    port: int

    @classmethod
    def open(cls, host: str) -> "MeetingPoint":
        listener = socket.create_server((host, 0), backlog=4)
        return cls(listener, host, listener.getsockname()[1])

    def serve(self, timeout_s: float) -> TCPStore:
        """The store, served from the socket, which now belongs to it."""
        return TCPStore(
            self.host,
            self.port,
            2,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self.listener.detach(),
        )

    def close(self) -> None:
        """For a meeting that does not take place."""
        self.listener.close()


def join(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store at a meeting point that the peer has opened."""
    return TCPStore(
        host, port, 2, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
