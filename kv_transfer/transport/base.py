"""The one seam between transfer logic and the network's data path."""

from typing import Protocol

import torch


class Link(Protocol):
    """An ordered byte channel between exactly two workers, used by one thread at each end.

    Every implementation passes tests/contract/test_link.py.
    """

    def send(self, data: torch.Tensor) -> None:
        """Returns once `data` (uint8, [n]) may be reused.

        Raises:
            TransferError: LINK_DOWN when the peer is gone, DEADLINE when it does not take the bytes in
                time. The link is unusable afterwards.
        """

    def recv(self, into: torch.Tensor) -> None:
        """Fill `into` (uint8, [n]) with the next bytes; the peer sends exactly as many in one call.

        Raises:
            TransferError: as for `send`; `into` then holds anything.
        """

    def close(self) -> None:
        """Idempotent, from any thread. Pending and later calls at both ends raise LINK_DOWN."""
