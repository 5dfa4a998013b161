"""Which replica takes a request: the least loaded one that fits. Pure."""

from collections.abc import Sequence
from zlib import crc32

from gateway.routing.snapshot import Ask, Candidate
from kv_transfer.api import WireFormat


def choose(
    ask: Ask, candidates: Sequence[Candidate], *, preferred: WireFormat | None = None
) -> Candidate | None:
    """The best candidate; None when the request fits into none of them.

    A candidate that has room now goes before one in which the request would wait for pages; one with the
    preferred cache before others. Equal loads are broken by a hash of request and replica: gateways that
    share no state still spread many requests.
    """

    def rank(candidate: Candidate) -> tuple[bool, bool, int, int, str]:
        waits = candidate.free_pages < ask.pages
        other = preferred is not None and candidate.format is not preferred
        spread = crc32(f"{ask.request_id}/{candidate.replica_id}".encode())
        return waits, other, candidate.load, spread, candidate.replica_id

    able = (candidate for candidate in candidates if candidate.total_pages >= ask.pages)
    return min(able, key=rank, default=None)
