"""What a broken transfer would do, for tests that must notice it."""

from collections.abc import Sequence

from kv_transfer.api.faults import FaultConfig


class Faults:
    """Applied where the real thing could go wrong; does nothing without a configuration."""

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._last: Sequence[int] = ()

    def pages(self, page_ids: Sequence[int]) -> Sequence[int]:
        """The pages to gather instead of `page_ids`: with `foreign_pages`, those of an earlier group."""
        if not self._config.foreign_pages:
            return page_ids
        wrong = [
            self._last[i % len(self._last)] if self._last else page_ids[-1] for i in range(len(page_ids))
        ]
        self._last = list(page_ids)
        return wrong
