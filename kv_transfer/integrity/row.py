"""One request's pages in one cache group."""

from dataclasses import dataclass, field

from kv_transfer.integrity.tags import NO_TAG


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

    def has_at(self, index: int, page: int, tag: int) -> bool:
        return index < len(self.pages) and (self.pages[index], self.tags[index]) == (page, tag)

    def append(self, page: int, tag: int, *, own: bool) -> None:
        self.pages.append(page)
        self.tags.append(tag)
        self.own.append(own)

    def lose(self, page: int) -> None:
        """Entries of a page that is the request's no more keep its number, with no tag."""
        self.tags = [NO_TAG if held == page else tag for held, tag in zip(self.pages, self.tags, strict=True)]
