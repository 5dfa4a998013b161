"""The ledger again, slow and obviously right: nothing is kept that can be found by looking at everything."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.tags import NO_DOMAIN, NO_TAG, TagSource, tag_domain


@dataclass
class Entry:
    page: int
    tag: int
    own: bool
    lost: bool = False
    """The page was freed under this entry and given to somebody else."""
    freed: bool = False
    """The page was freed under this entry in this step."""


@dataclass
class Binding:
    key: Hashable
    page: int
    tag: int
    domain: int | None


class SlowLedger:
    def __init__(self, pages: int, groups: int, *, free: Iterable[int]) -> None:
        self.counts: Counter[IntegrityCause] = Counter()
        self.source = TagSource()
        self.tags = [self.source.next(NO_DOMAIN) for _ in range(pages)]
        self.free = set(free)
        self.writers: dict[int, str] = {}
        self.authors: dict[int, str | None] = {}
        self.groups = groups
        self.rows: dict[str, list[list[Entry]]] = {}
        self.bindings: list[Binding] = []
        self.served: tuple[str, int] | None = None
        self.looked_at: set[int] = set()
        self.found: set[int] = set()
        self.flagged: dict[str, PageFault] = {}

    def entries(self, request_id: str, page: int) -> list[Entry]:
        return [e for row in self.rows.get(request_id, []) for e in row if e.page == page]

    def owners(self, page: int) -> set[str]:
        return {r for r in self.rows if page and any(not e.lost for e in self.entries(r, page))}

    def flag(self, cause: IntegrityCause, page: int, requests: Iterable[str]) -> None:
        requests = set(requests)
        for request_id in requests - self.flagged.keys():
            expected = next((e.tag for e in self.entries(request_id, page) if not e.lost), 0)
            self.flagged[request_id] = PageFault(cause, page, expected, self.tags[page])
            self.counts[cause] += 1
        self.counts[cause] += not requests

    def retag(self, page: int, domain: int) -> None:
        self.tags[page] = self.source.next(domain)
        self.looked_at.add(page)

    # -- the pool

    def allocated(self, page: int) -> None:
        freed = any(e.freed for r in self.rows for e in self.entries(r, page))
        if page in self.free or (self.owners(page) and not freed):
            self.flag(IntegrityCause.DOUBLE_ASSIGNED, page, self.owners(page))
        self.bindings = [b for b in self.bindings if b.page != page]
        self.authors[page] = None if self.served is None else self.served[0]
        if self.served is not None:
            self.writers[page] = self.served[0]
        self.retag(page, self.served[1] if self.served else NO_DOMAIN)

    def queued(self, page: int, references: int) -> bool:
        if page in self.free or references:
            self.flag(IntegrityCause.FREED, page, self.owners(page))
            return False
        self.free.add(page)
        self.writers.pop(page, None)
        before = self.tags[page]
        self.retag(page, tag_domain(before))
        for binding in self.bindings:
            if (binding.page, binding.tag) == (page, before):
                binding.tag = self.tags[page]
        for request_id in self.owners(page):
            for entry in self.entries(request_id, page):
                entry.freed = not entry.lost
        return True

    def taken(self, page: int) -> None:
        self.free.discard(page)
        self.looked_at.add(page)

    def touched(self, page: int) -> None:
        self.looked_at.add(page)
        self.found.add(page)

    def bound(self, key: Hashable, page: int) -> None:
        self.unbound(key, page)
        served, domain = self.served or (None, None)
        tag = self.tags[page]
        if served is not None and self.authors.get(page) not in (None, served):
            tag = tag if any(e.tag == tag for e in self.entries(served, page)) else NO_TAG
        self.bindings.append(Binding(key, page, tag, domain))

    def unbound(self, key: Hashable, page: int) -> None:
        self.bindings = [b for b in self.bindings if (b.key, b.page) != (key, page)]

    def hit_refusal(self, key: Hashable, page: int) -> IntegrityCause | None:
        domain = None if self.served is None else self.served[1]
        cause: IntegrityCause | None = IntegrityCause.STALE_PREFIX
        for b in self.bindings:
            if (b.key, b.page, b.tag) == (key, page, self.tags[page]):
                right = b.domain == domain and domain is not None
                cause = None if right else IntegrityCause.FOREIGN_DOMAIN
        if cause is not None:
            self.counts[cause] += 1
        return cause

    # -- the cache manager

    def serve(self, request_id: str, domain: int) -> None:
        self.served = (request_id, domain)
        self.found.clear()

    def serve_nobody(self) -> None:
        self.served = None

    def grow(self, request_id: str, pages: Sequence[Iterable[int]]) -> None:
        rows = self.rows.setdefault(request_id, [[] for _ in range(self.groups)])
        for row, more in zip(rows, pages, strict=True):
            for page in more:
                self.obtain(request_id, row, page)

    def obtain(self, request_id: str, row: list[Entry], page: int) -> None:
        if page == 0:
            row.append(Entry(0, 0, False))
            return
        self.looked_at.add(page)
        losers = {r for r in self.rows if any(e.freed for e in self.entries(r, page))}
        before = self.owners(page)
        if losers:
            self.flag(IntegrityCause.REALLOCATED, page, losers)
            for loser in losers:
                for entry in self.entries(loser, page):
                    entry.lost = entry.freed or entry.lost
                    entry.freed = False
        row.append(Entry(page, self.tags[page], self.writers.get(page) == request_id))
        others = before - losers
        hashed = any((b.page, b.tag) == (page, self.tags[page]) for b in self.bindings)
        if request_id in others:
            self.flag(IntegrityCause.DOUBLE_ASSIGNED, page, {request_id})
        elif (others and not hashed) or (self.writers.get(page) != request_id and page not in self.found):
            self.flag(IntegrityCause.DOUBLE_ASSIGNED, page, others | {request_id})
        if page in self.free:
            self.flag(IntegrityCause.FREED, page, self.owners(page))

    def skip(self, request_id: str, group: int, end: int) -> None:
        row = self.rows[request_id][group]
        for index, entry in enumerate(row[:end]):
            if entry.page:
                self.looked_at.add(entry.page)
            row[index] = Entry(0, 0, False)

    def drop(self, request_id: str) -> None:
        self.looked_at |= {e.page for row in self.rows.pop(request_id, []) for e in row if e.page}

    def lost(
        self, request_id: str, tables: Sequence[Sequence[int]], references: Callable[[int], int]
    ) -> list[tuple[int, int]]:
        lost = []
        given: list[int] = []
        for group, table in enumerate(tables):
            for index, page in enumerate(table):
                entry = self.rows[request_id][group][index]
                mine = (entry.page, entry.tag) == (page, self.tags[page])
                owners = self.owners(page) - {request_id}
                others = sum(any(e.tag == self.tags[page] for e in self.entries(r, page)) for r in owners)
                if page and mine and others + given.count(page) < references(page):
                    given.append(page)
                elif page:
                    lost.append((group, index))
        return lost

    # -- once a step

    def reconcile(self, references: Callable[[int], int], held: Callable[[], Counter[int]]) -> None:
        for page in range(1, len(self.tags)):
            cause = IntegrityCause.FREED if page in self.free else IntegrityCause.REALLOCATED
            losers = {r for r in self.rows if any(e.freed for e in self.entries(r, page))}
            if losers:
                self.flag(cause, page, losers)
        for rows in self.rows.values():
            for row in rows:
                for entry in row:
                    entry.lost, entry.freed = entry.lost or entry.freed, False
        for page in sorted(self.looked_at):
            if len(self.owners(page)) + held()[page] != references(page) != len(self.owners(page)):
                self.flag(IntegrityCause.DOUBLE_ASSIGNED, page, self.owners(page))
        self.looked_at.clear()

    def take_flagged(self) -> dict[str, PageFault]:
        flagged, self.flagged = self.flagged, {}
        return flagged
