"""A page pool in forty lines, that tells ledgers of its changes in the order in which the real one does."""

import random
from collections import Counter, deque
from typing import Any


class ToyPool:
    """Page 0 is the null page. Each request has one table a cache group."""

    def __init__(self, pages: int, groups: int, ledgers: "list[Any]") -> None:
        self.groups = groups
        self.queue = deque(range(1, pages))
        self.references = [0] * pages
        self.hashes: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.domains: dict[str, int] = {}
        self.held: Counter[int] = Counter()
        self.ledgers = ledgers

    def tell(self, event: str, *args: Any) -> Any:
        """The first ledger's answer, all agreeing."""
        answers = [getattr(ledger, event)(*args) for ledger in self.ledgers]
        return answers[0]

    # what the pool does

    def allocate(self) -> int:
        page = self.queue.popleft()
        self.tell("taken", page)
        self.evict(page)
        self.references[page] += 1
        self.tell("allocated", page)
        return page

    def touch(self, page: int) -> None:
        if page in self.queue:
            self.queue.remove(page)
            self.tell("taken", page)
        self.references[page] += 1
        self.tell("touched", page)

    def free(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0 and self.tell("queued", page, 0):
            self.queue.append(page)

    def evict(self, page: int) -> None:
        for key in [k for k, p in self.hashes.items() if p == page]:
            del self.hashes[key]
            self.tell("unbound", key, page)

    # what the cache manager does

    def admit(self, request_id: str, domain: int, fresh: int) -> bool:
        """Hits are looked for in all hashes of the domain, in each group."""
        if fresh * self.groups > len(self.queue):
            return False
        self.domains[request_id] = domain
        self.tell("serve", request_id, domain)
        hits = [p for k, p in self.hashes.items() if k.startswith(f"{domain}:")][:2]
        hits = [p for p in hits if self.tell("hit_refusal", self.key_of(p), p) is None]
        tables: list[list[int]] = [[] for _ in range(self.groups)]
        for page in hits:
            self.touch(page)
            tables[0].append(page)
        fresh = min(fresh, len(self.queue) // self.groups)
        for table in tables:
            table.extend(self.allocate() for _ in range(fresh))
        self.tables[request_id] = tables
        self.tell("grow", request_id, tables)
        self.tell("serve_nobody")
        return True

    def extend(self, request_id: str, count: int) -> None:
        count = min(count, len(self.queue) // self.groups)
        self.tell("serve", request_id, self.domains[request_id])
        more = [[self.allocate() for _ in range(count)] for _ in range(self.groups)]
        for table, pages in zip(self.tables[request_id], more, strict=True):
            table.extend(pages)
        self.tell("grow", request_id, more)
        self.tell("serve_nobody")

    def slide(self, request_id: str, group: int, end: int, then_extend: int) -> None:
        """The window moves on. The real manager allocates in the same call; both are told afterwards."""
        table = self.tables[request_id][group]
        end = min(end, len(table) - 1)
        for index in range(max(0, end)):
            if table[index]:
                page, table[index] = table[index], 0
                self.free(page)
        count = min(then_extend, len(self.queue) // self.groups)
        self.tell("serve", request_id, self.domains[request_id])
        more = [[self.allocate() for _ in range(count)] for _ in range(self.groups)]
        self.tell("skip", request_id, group, max(0, end))
        for rows, pages in zip(self.tables[request_id], more, strict=True):
            rows.extend(pages)
        self.tell("grow", request_id, more)
        self.tell("serve_nobody")

    def publish(self, request_id: str, index: int) -> None:
        table = self.tables[request_id][0]
        if index < len(table) and table[index] and not self.key_of(table[index]):
            key = f"{self.domains[request_id]}:{request_id}:{index}"
            self.hashes[key] = table[index]
            self.tell("serve", request_id, self.domains[request_id])
            self.tell("bound", key, table[index])
            self.tell("serve_nobody")

    def finish(self, request_id: str, *, hold: bool = False) -> None:
        """With `hold` the pages stay referenced, as the deferred frees of steps in flight do."""
        tables = self.tables.pop(request_id)
        lost = self.tell("lost", request_id, tables, self.references.__getitem__)
        returned = [
            page
            for group, table in enumerate(tables)
            for index, page in enumerate(table)
            if page and (group, index) not in lost
        ]
        self.tell("drop", request_id)
        for page in returned:
            if hold:
                self.held[page] += 1
            else:
                self.free(page)

    def release_held(self) -> None:
        for page, count in self.held.items():
            for _ in range(count):
                self.free(page)
        self.held.clear()

    def key_of(self, page: int) -> str:
        return next((k for k, p in self.hashes.items() if p == page), "")


def random_step(rnd: random.Random, pool: ToyPool, count: int) -> None:
    """One to three things that lawful requests do; the second of two groups has a window."""
    for _ in range(rnd.randrange(1, 4)):
        name = rnd.choice(sorted(pool.tables)) if pool.tables else ""
        act = rnd.randrange(6) if name else 0
        if act == 0:
            pool.admit(f"r{count}.{rnd.random()}", rnd.randrange(1, 3), rnd.randrange(1, 3))
        elif act == 1:
            pool.extend(name, 1)
        elif act == 2:
            pool.slide(name, 1, rnd.randrange(1, 4), then_extend=rnd.randrange(2))
        elif act == 3:
            pool.publish(name, rnd.randrange(3))
        else:
            pool.finish(name)
