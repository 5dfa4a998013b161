"""What the gateway asks of an engine. Token ids only: engines never see text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How decode chooses tokens. Defaults are neutral; the gateway has validated every value."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all of the vocabulary."""
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """Compute the prompt and hold its pages for one decode engine. No sampling: its token is discarded."""

    request_id: str
    """Minted by the gateway; never the client's."""
    transfer_id: str
    """128 random bits in hex. This call announces the transfer."""
    decode_engine: str
    """Engine id of the only receiver allowed to fetch the pages."""
    token_ids: tuple[int, ...]
    cache_salt: str
    deadline_s: float
    traceparent: str = ""
    """W3C trace context of the request; empty when nobody traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """Produce the answer. Tokens go to `bus_address`; the call returns when the request ends."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    cache_salt: str
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    gateway_id: str
    bus_address: str
    deadline_s: float
    transfer_id: str | None = None
    """None: decode computes the prompt itself."""
    prefill_engine: str | None = None
    traceparent: str = ""
    """W3C trace context of the request; empty when nobody traces."""
