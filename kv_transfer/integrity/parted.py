"""Pages that were given back before it was known what became of the last step that was to write to them.

A flagged row writes nothing. Where its request is aborted, or preempted, before that is known, its pages are
free by then, and their hashes, made while the step was put together, promise what was never written.
"""


class Parted:
    def __init__(self) -> None:
        self.step = 0
        """Number of the step that was put together last."""
        self._written: dict[str, tuple[int, list[list[int | None]]]] = {}

    def add(self, request_id: str, written: list[list[int | None]]) -> None:
        """
        Args:
            written: by cache group, in logical order; None for a page that the request did not write to.
        """
        self._written[request_id] = (self.step, written)

    def of(self, request_id: str) -> list[list[int | None]]:
        """As they were added; empty for a request that gave nothing back since the steps under way began."""
        _, written = self._written.get(request_id, (0, []))
        return written

    def forget(self, request_id: str) -> None:
        self._written.pop(request_id, None)

    def settled(self, step: int) -> None:
        """What became of this step, and of all before it, is known."""
        for request_id in [r for r, (last, _) in self._written.items() if last <= step]:
            del self._written[request_id]
