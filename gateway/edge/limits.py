"""How long a client may take for each part of an exchange, and how much it may send before it is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    header_timeout_s: float
    """From a connection, or a further request's first byte, to the end of the request's headers."""
    client_timeout_s: float
    """For which a client may take none of its answer."""
    max_header_bytes: int
    """Names and values of one request's headers, with its first line."""
    send_buffer_bytes: int = 131_072
    """What the kernel holds for a client that does not read; Linux doubles it."""
