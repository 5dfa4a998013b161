"""Which content a block hash stands for: the page's tag and the tenant's domain at the time of hashing."""

from collections.abc import Hashable

from kv_transfer.api.integrity import IntegrityCause


class HashBindings:
    """`(hash, page) -> (tag, domain)`. A hash may lead to several pages, a page may have several hashes."""

    def __init__(self) -> None:
        self._bound: dict[tuple[Hashable, int], tuple[int, int | None]] = {}
        self._keys: dict[int, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, key: Hashable, page: int, tag: int, domain: int | None) -> None:
        """A domain of None is nobody's: such a hash never leads to a hit."""
        self._bound[key, page] = (tag, domain)
        self._keys.setdefault(page, set()).add(key)

    def unbind(self, key: Hashable, page: int) -> None:
        if self._bound.pop((key, page), None) is not None:
            keys = self._keys[page]
            keys.discard(key)
            if not keys:
                del self._keys[page]

    def follow(self, page: int, before: int, after: int) -> None:
        """The page's tag changes, its content does not. Bindings that were stale already stay so."""
        for key in self._keys.get(page, ()):
            tag, domain = self._bound[key, page]
            if tag == before:
                self._bound[key, page] = (after, domain)

    def drop(self, page: int) -> None:
        """The page's content goes."""
        for key in self._keys.pop(page, ()):
            del self._bound[key, page]

    def clear(self) -> None:
        self._bound.clear()
        self._keys.clear()

    def covers(self, page: int, tag: int) -> bool:
        """Whether some hash stands for the page as it is now."""
        return any(self._bound[key, page][0] == tag for key in self._keys.get(page, ()))

    def refusal(self, key: Hashable, page: int, tag: int, domain: int | None) -> IntegrityCause | None:
        """Why the hash must not lead this tenant to the page; None when it may."""
        bound = self._bound.get((key, page))
        if bound is None or bound[0] != tag:
            return IntegrityCause.STALE_PREFIX
        if domain is None or bound[1] != domain:
            return IntegrityCause.FOREIGN_DOMAIN
        return None

    def expected(self, key: Hashable, page: int) -> int:
        """The tag that the hash is bound to; 0 when it is not."""
        bound = self._bound.get((key, page))
        return 0 if bound is None else bound[0]
