"""A link on which a bit flips, when told so."""

import threading

import torch

from kv_transfer.transport.base import Link


class CorruptingLink:
    def __init__(self, link: Link, flip_next: threading.Event) -> None:
        """
        Args:
            flip_next: while set, the next bytes to be received are not those that were sent.
        """
        self._link, self._flip_next = link, flip_next

    def send(self, data: torch.Tensor) -> None:
        self._link.send(data)

    def recv(self, into: torch.Tensor) -> None:
        self._link.recv(into)
        if self._flip_next.is_set():
            self._flip_next.clear()
            into[len(into) // 2] ^= 1

    def close(self) -> None:
        self._link.close()
