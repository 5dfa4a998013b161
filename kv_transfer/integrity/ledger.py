"""The ledger: which page belongs to whom, since when, and who may write to it.

It is told of every change by those who see it (`hooks.py`) and compares what it was told with what the pool
says. Two kinds of callers, in the engine's one thread:

    allocated, queued, taken, touched, bound, ...   the pool, page by page
    serve, grow, skip, drop                         the cache manager, request by request

Once a step `reconcile` checks the invariants on the pages that changed, and `take_delta` hands the changes to
those who check tables. Work is O(changed pages), never O(pages).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from kv_transfer.api.integrity import Coverage, IntegrityCause, PageFault
from kv_transfer.api.ledger import LedgerPage, LedgerRow, LedgerSnapshot
from kv_transfer.integrity.base import CHECKS
from kv_transfer.integrity.bindings import HashBindings
from kv_transfer.integrity.delta import LedgerDelta, RowGrowth, RowSkip
from kv_transfer.integrity.row import Row
from kv_transfer.integrity.tags import NO_DOMAIN, NO_TAG, TagSource, tag_domain


class GenerationLedger:
    def __init__(self, pages: int, groups: int, *, free: Iterable[int], null_page: int = 0) -> None:
        """
        Args:
            pages: of the pool, the null page among them.
            free: those that wait in the pool's queue now; no others may be in use but the null page.
        """
        self.counts: Counter[IntegrityCause] = Counter()
        self._groups = groups
        self._null = null_page
        self._source = TagSource()
        self._tags = [self._source.next(NO_DOMAIN) for _ in range(pages)]
        self._free = bytearray(pages)
        for page in free:
            self._free[page] = 1
        self._owners: dict[int, dict[str, int]] = {}
        """By page: its owners, and in how many entries of its tables each has it (more than one is wrong)."""
        self._writers: dict[int, str] = {}
        self._authors: dict[int, tuple[str, int]] = {}
        """The same, also of pages that were freed since: what they hold is still of that request. And the tag
        under which it was given the page."""
        self._rows: dict[str, list[Row]] = {}
        self._bindings = HashBindings()
        self._serving: tuple[str, int] | None = None
        self._touched: set[int] = set()
        """Pages that whoever is, or was last, served found by their content."""
        self._fresh: set[int] = set()
        """Allocated for the step that is being put together."""
        self._changed: set[int] = set()
        self._freed_owned: dict[int, dict[str, int]] = {}
        """Freed while somebody mapped them. A window that moved on is a good reason; it is told later."""
        self._flagged: dict[str, PageFault] = {}
        self._dirty = dict(enumerate(self._tags))
        self._dropped: list[str] = []
        self._skips: list[RowSkip] = []
        self._grown: dict[str, None] = {}

    # -- what is known

    def tag(self, page: int) -> int:
        return self._tags[page]

    def tag_if_page(self, page: int) -> int | None:
        """None for what is no page."""
        return self._tags[page] if 0 <= page < len(self._tags) else None

    def is_free(self, page: int) -> bool:
        return bool(self._free[page])

    def owners(self, page: int) -> frozenset[str]:
        return frozenset(self._owners.get(page, ()))

    def writer(self, page: int) -> str | None:
        """The request for which the page was allocated; None once it was freed."""
        return self._writers.get(page)

    def author(self, page: int) -> str | None:
        """The request for which the page was allocated last, whether or not it has been freed since."""
        return self._authors.get(page, (None, NO_TAG))[0]

    def authored(self, page: int) -> int:
        """The tag under which the page's author was given it."""
        return self._authors.get(page, (None, NO_TAG))[1]

    def is_fresh(self, page: int) -> bool:
        """Whether the page was allocated for the step that is being put together: nothing is in it yet."""
        return page in self._fresh

    def extents(self, request_id: str) -> list[tuple[int, int]]:
        """(Entries that fell out of the window, entries) of its row in each group; zeros when unknown."""
        rows = self._rows.get(request_id)
        return [(0, 0)] * self._groups if rows is None else [(row.skipped, len(row.pages)) for row in rows]

    def row(self, request_id: str, group: int) -> list[tuple[int, int]]:
        """(page, tag) in logical order; (null page, 0) where attention never looks. Empty when unknown."""
        rows = self._rows.get(request_id)
        return [] if rows is None else list(zip(rows[group].pages, rows[group].tags, strict=True))

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def bindings(self) -> int:
        return len(self._bindings)

    def coverage(self) -> Coverage:
        return Coverage(ledger="generation", checked=CHECKS, unchecked=())

    def tags(self, pages: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._tags[page] for page in pages)

    def snapshot(self) -> LedgerSnapshot:
        """From any thread: dictionaries and lists are copied whole before they are looked through."""
        rows = self._rows.copy()
        owners, writers = self._owners.copy(), self._writers.copy()
        return LedgerSnapshot(
            ledger="generation",
            rows=tuple(
                LedgerRow(request_id=name, group=group, pages=tuple(row.pages), tags=tuple(row.tags))
                for name, groups in rows.items()
                for group, row in enumerate(groups)
            ),
            pages=tuple(
                LedgerPage(page=page, tag=self._tags[page], owners=tuple(of_page), writer=writers.get(page))
                for page, of_page in sorted(owners.items())
            ),
        )

    def given(self, request_id: str, pages: Sequence[int]) -> tuple[int, ...]:
        row = self.row(request_id, 0)[: len(pages)]
        return tuple(tag for _, tag in row)

    # -- the pool, page by page

    def allocated(self, page: int) -> None:
        """A page left the pool with new content to come."""
        if self._free[page]:
            self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, self._owners.get(page, ()))
        elif page not in self._freed_owned and page in self._owners:
            self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, self._owners[page])
        self._bindings.drop(page)
        self._fresh.add(page)
        self._authors.pop(page, None)
        name, domain = self._serving or (None, NO_DOMAIN)
        tag = self._retag(page, domain)
        if name is not None:
            self._writers[page] = name
            self._authors[page] = name, tag

    def queued(self, page: int, references: int) -> bool:
        """A page is about to be queued as free. False: it must not, or the pool would give it out twice."""
        owners = self._owners.get(page)
        if self._free[page] or references:
            self._flag(IntegrityCause.FREED, page, owners or ())
            return False
        self._free[page] = 1
        self._fresh.discard(page)
        self._writers.pop(page, None)
        before = self._tags[page]
        self._bindings.follow(page, before, self._retag(page, tag_domain(before)))
        if owners:
            self._freed_owned[page] = dict(owners)
        return True

    def taken(self, page: int) -> None:
        """A page left the queue of free ones, to be allocated or because its content was asked for."""
        self._free[page] = 0
        self._changed.add(page)

    def touched(self, page: int) -> None:
        """A page got one more reference for its content."""
        self._changed.add(page)
        self._touched.add(page)

    def bound(self, key: Hashable, page: int) -> None:
        """Whoever is served may have lost the page to another since: what that one writes is not what the
        hash promises."""
        domain = None if self._serving is None else self._serving[1]
        self._bindings.bind(key, page, NO_TAG if self._is_lost(page) else self._tags[page], domain)

    def _is_lost(self, page: int) -> bool:
        if self._serving is None or self.author(page) in (None, self._serving[0]):
            return False
        return not self._is_holder(self._serving[0], page)

    def misbound(self, page: int) -> bool:
        """Whether one who had lost the page hashed it."""
        return self._bindings.covers(page, NO_TAG)

    def unbound(self, key: Hashable, page: int) -> None:
        self._bindings.unbind(key, page)

    def forgot_hashes(self) -> None:
        self._bindings.clear()

    def hit_refusal(self, key: Hashable, page: int) -> PageFault | None:
        """Why the hash must not lead whoever is served to the page. Counted; the hash is to be evicted."""
        domain = None if self._serving is None else self._serving[1]
        tag = self._tags[page]
        cause = self._bindings.refusal(key, page, tag, domain)
        if cause is None:
            return None
        self.counts[cause] += 1
        return PageFault(cause, page, self._bindings.expected(key, page), tag)

    # -- the cache manager, request by request

    def serve(self, request_id: str, domain: int) -> None:
        """Until `serve_nobody`, what the pool tells is done for this request."""
        self._serving = (request_id, domain)
        self._touched.clear()

    def serve_nobody(self) -> None:
        self._serving = None

    @property
    def serving(self) -> str | None:
        return None if self._serving is None else self._serving[0]

    def grow(self, request_id: str, pages: Sequence[Iterable[int]]) -> None:
        """The request obtained these pages, by cache group, after those that it has."""
        rows = self._rows.get(request_id)
        if rows is None:
            rows = self._rows[request_id] = [Row() for _ in range(self._groups)]
        for row, more in zip(rows, pages, strict=True):
            for page in more:
                if page == self._null:
                    row.append(page, NO_TAG, own=False)
                else:
                    self._obtain(request_id, row, page)
        self._grown[request_id] = None

    def _obtain(self, request_id: str, row: Row, page: int) -> None:
        self._changed.add(page)
        if lost := self._freed_owned.pop(page, None):
            # Freed under its owners and given out anew: they lost it, it is this request's alone.
            self._flag(IntegrityCause.REALLOCATED, page, lost)
            for loser in lost:
                self._take_from(loser, page)
        tag = self._tags[page]
        own = self._writers.get(page) == request_id
        row.append(page, tag, own=own)
        owners = self._owners.setdefault(page, {})
        before = owners.get(request_id, 0)
        owners[request_id] = before + 1
        if before:
            self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, (request_id,))
        elif len(owners) > 1 and not self._bindings.covers(page, tag):
            self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, owners)
        elif not own and page not in self._touched:
            # Neither allocated for this request nor found by its content: given out as new while in use.
            self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, owners)
        if self._free[page]:
            self._flag(IntegrityCause.FREED, page, owners)

    def _take_from(self, loser: str, page: int) -> None:
        for row in self._rows[loser]:
            row.lose(page)
        owners = self._owners[page]
        del owners[loser]
        if not owners:
            del self._owners[page]

    def skip(self, request_id: str, group: int, end: int) -> None:
        """The window moved on: entries before `end` are given back, those that have not been already."""
        row = self._rows[request_id][group]
        start, row.skipped = row.skipped, max(row.skipped, end)
        for index in range(start, end):
            self._disown(request_id, row.pages[index], row.tags[index])
            row.pages[index], row.tags[index], row.own[index] = self._null, NO_TAG, False
        if start < min(end, row.sent):
            self._skips.append(RowSkip(request_id, group, start, min(end, row.sent)))

    def drop(self, request_id: str) -> None:
        """The request gives all its pages back, or has them taken away."""
        rows = self._rows.pop(request_id, None)
        if rows is None:
            return
        for row in rows:
            for page, tag in zip(row.pages, row.tags, strict=True):
                self._disown(request_id, page, tag)
        self._grown.pop(request_id, None)
        if any(row.sent for row in rows):
            self._dropped.append(request_id)
            self._skips = [skip for skip in self._skips if skip.request_id != request_id]

    def _disown(self, request_id: str, page: int, tag: int) -> None:
        if page == self._null:
            return
        self._changed.add(page)
        if tag == NO_TAG:
            return  # lost before
        owners = self._owners[page]
        owners[request_id] -= 1
        if owners[request_id]:
            return
        for owned in (self._owners, self._freed_owned):
            if page in owned:
                of_page = owned[page]
                if request_id in of_page:
                    del of_page[request_id]
                if not of_page:
                    del owned[page]

    def lost(
        self, request_id: str, tables: Sequence[Sequence[int]], references: Callable[[int], int]
    ) -> list[tuple[int, int]]:
        """Entries (group, index) of the request's tables that it must not give back.

        Those whose page changed hands under it, and those whose every reference is some other owner's, one
        to whom the page did not change hands.
        """
        rows = self._rows.get(request_id)
        claimed: Counter[int] = Counter()
        lost = []
        for group, table in enumerate(tables):
            for index, page in enumerate(table):
                if page == self._null:
                    continue
                others = sum(self._is_holder(r, page) for r in self._owners.get(page, ()) if r != request_id)
                mine = rows is not None and rows[group].has_at(index, page, self._tags[page])
                if mine and others + claimed[page] < references(page):
                    claimed[page] += 1
                else:
                    lost.append((group, index))
        return lost

    def _is_holder(self, request_id: str, page: int) -> bool:
        return any(row.has(page, self._tags[page]) for row in self._rows.get(request_id, ()))

    # -- once a step

    def reconcile(self, references: Callable[[int], int], held: Callable[[], Mapping[int, int]]) -> None:
        for page in sorted(self._freed_owned):
            cause = IntegrityCause.FREED if self._free[page] else IntegrityCause.REALLOCATED
            self._flag(cause, page, self._freed_owned[page])
            # Some of them have ended, and hold their pages for a transfer: whoever gets the page is alone.
            for loser in self._freed_owned[page]:
                self._take_from(loser, page)
        self._freed_owned.clear()
        uneven = [p for p in self._changed if len(self._owners.get(p, ())) != references(p)]
        self._changed.clear()
        if not uneven:
            return
        unexplained = held()
        for page in sorted(uneven):
            owners = self._owners.get(page, {})
            if len(owners) + unexplained.get(page, 0) != references(page):
                self._flag(IntegrityCause.DOUBLE_ASSIGNED, page, owners)

    def take_flagged(self) -> dict[str, PageFault]:
        flagged, self._flagged = self._flagged, {}
        return flagged

    def take_delta(self) -> LedgerDelta:
        delta = LedgerDelta(self._dropped, self._skips, self._dirty)
        self._dropped, self._skips, self._dirty = [], [], {}
        for request_id in self._grown:
            for group, row in enumerate(self._rows[request_id]):
                start, row.sent = row.sent, len(row.pages)
                if start < row.sent:
                    rest = slice(start, row.sent)
                    delta.grown.append(
                        RowGrowth(request_id, group, start, row.pages[rest], row.tags[rest], row.own[rest])
                    )
        self._grown.clear()
        self._fresh.clear()
        return delta

    # -- inside

    def _retag(self, page: int, domain: int) -> int:
        tag = self._tags[page] = self._dirty[page] = self._source.next(domain)
        self._changed.add(page)
        return tag

    def _flag(self, cause: IntegrityCause, page: int, requests: Iterable[str]) -> None:
        """A page of nobody is counted too: something freed or gave out what it did not have."""
        found = self._tags[page]
        requests = list(requests)
        for request_id in requests:
            if request_id not in self._flagged:
                self._flagged[request_id] = PageFault(cause, page, self._expected(request_id, page), found)
                self.counts[cause] += 1
        if not requests:
            self.counts[cause] += 1

    def _expected(self, request_id: str, page: int) -> int:
        """The tag under which the request has the page; none when it lost the page before."""
        entries = (zip(row.pages, row.tags, strict=True) for row in self._rows.get(request_id, ()))
        return next((tag for row in entries for held, tag in row if held == page and tag), NO_TAG)
