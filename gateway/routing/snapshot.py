"""What the routing policy knows about replicas at one moment."""

from dataclasses import dataclass

from kv_transfer.api import WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One replica that is attached and was heard of lately."""

    replica_id: str
    format: WireFormat
    """Of its cache."""
    total_pages: int
    free_pages: int
    """By its own last word, less what requests need that have been given to it and have no token yet."""
    load: int
    """Requests in it: running and waiting by its own last word, or what this gateway has in it if more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    request_id: str
    pages: int
    """Pages that the request holds when its prompt is in the cache."""
