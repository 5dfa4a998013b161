"""Wire formats: one file per family, one registry."""

from kv_transfer.codec.base import Codec
from kv_transfer.codec.plain import CODECS as PLAIN

CODECS: dict[str, Codec] = {**PLAIN}
"""By wire format. A format missing here is refused at start-up, by name."""
