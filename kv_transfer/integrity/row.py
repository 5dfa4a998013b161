"""One request's pages in one cache group."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """In logical order."""

    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    skipped: int = 0
    """Leading entries that fell out of the window."""
    sent: int = 0
    """Entries that `take_delta` has handed on."""

    def has(self, page: int, tag: int) -> bool:
        """Whether the request was given the page under this tag."""
        return (page, tag) in zip(self.pages, self.tags, strict=True)
