"""What a broken transfer would do, for tests that must notice it."""

from collections.abc import Sequence

from kv_transfer.api.faults import FaultConfig


class Faults:
    """Applied where the real thing could go wrong; does nothing without a configuration."""

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._last: Sequence[int] = ()

    def pages(self, transfer_id: str, page_ids: Sequence[int]) -> Sequence[int]:
        """The pages to gather instead of `page_ids`: with `foreign_pages`, those of an earlier group."""
        if not self._config.foreign_pages:
            return page_ids
        earlier, self._last = self._last, list(page_ids)
        if not earlier or not transfer_id.startswith(self._config.only_transfers):
            return page_ids
        return [earlier[i % len(earlier)] for i in range(len(page_ids))]
