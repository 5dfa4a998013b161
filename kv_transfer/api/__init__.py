"""What other packages may import from kv_transfer. Standard library and msgspec; pyzmq where used."""

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.api.faults import FaultConfig
from kv_transfer.api.gauges import EngineGauges
from kv_transfer.api.handoff import HandoffOutcome, HandoffReport, Role, StartReport, Ticket
from kv_transfer.api.integrity import (
    LEDGER_CHECKS,
    NOTHING_CHECKED,
    TABLE_CHECKS,
    Coverage,
    IntegrityCause,
    PageFault,
    PageIntegrityError,
)
from kv_transfer.api.ledger import LedgerPage, LedgerRow, LedgerSnapshot
from kv_transfer.api.log_fields import FieldFormatter, PrivateLog, request_fields
from kv_transfer.api.membership import Gate, Membership
from kv_transfer.api.page import BYTE_WIDE, CONVERTIBLE, ELEMENT_BYTES, Layout, WireFormat
from kv_transfer.api.scales import (
    FLOOR,
    MARGIN,
    LayerScales,
    Measured,
    ScaleFile,
    ScaleFileError,
    encode_scale_file,
    read_scale_file,
    scale_file_sha256,
    scale_for,
)

__all__ = [
    "BYTE_WIDE",
    "CONVERTIBLE",
    "ELEMENT_BYTES",
    "FLOOR",
    "LEDGER_CHECKS",
    "MARGIN",
    "NOTHING_CHECKED",
    "TABLE_CHECKS",
    "Contract",
    "Coverage",
    "EngineGauges",
    "FaultConfig",
    "FieldFormatter",
    "Gate",
    "HandoffOutcome",
    "HandoffReport",
    "IntegrityCause",
    "LayerScales",
    "Layout",
    "LedgerPage",
    "LedgerRow",
    "LedgerSnapshot",
    "Measured",
    "Membership",
    "PageFault",
    "PageIntegrityError",
    "PrivateLog",
    "Role",
    "ScaleFile",
    "ScaleFileError",
    "StartReport",
    "Ticket",
    "TransferCause",
    "TransferError",
    "WireFormat",
    "encode_scale_file",
    "read_scale_file",
    "request_fields",
    "scale_file_sha256",
    "scale_for",
]
