"""What is known of gathered pages only when the device has come so far, asked before the first byte leaves.

Lanes ask, on their threads; a transfer's pages leave on one lane.
"""

from collections.abc import Callable

from kv_transfer.codec import Encoded, NonfiniteSource
from kv_transfer.integrity.device import Verdicts
from kv_transfer.transport.lane import Fence


class Flaws:
    """Of one transfer: whether pages that were to be converted held no numbers."""

    def __init__(self, give_up: Callable[[NonfiniteSource], None]) -> None:
        """`give_up`: called once, from the lane's thread, before anything else is told of the transfer."""
        self._give_up = give_up
        self._found = False

    def withhold(self, encoded: Encoded) -> bool:
        """Whether these pages must not leave; nor do those that follow them."""
        if not self._found and (bad := encoded.nonfinite()) is not None:
            self._found = True
            self._give_up(bad)
        return self._found


class JudgedFence(Fence):
    """What a flagged request computed is not shipped, nor what was computed from pages that such a one was to
    write; and what holds no numbers is not converted."""

    def __init__(
        self, encoded: Encoded, flaws: Flaws, verdicts: Verdicts, request_ids: frozenset[str]
    ) -> None:
        """`request_ids`: none of them may be flagged."""
        super().__init__(encoded.wire.device)
        self._encoded, self._flaws = encoded, flaws
        self._verdicts, self._request_ids = verdicts, request_ids

    def withheld(self) -> bool:
        return self._flaws.withhold(self._encoded)

    def void(self) -> bool:
        return not self._request_ids.isdisjoint(self._verdicts.read())
