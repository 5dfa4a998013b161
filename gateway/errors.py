"""What can go wrong for a client, and the one table of HTTP status, number and word for each.

`status`, `number` and `code` are public: clients branch on them, so a released triple never changes.
Messages are for people and may change. No message ever repeats what the client sent.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

from workers.api import FaultKind


class ApiError(Exception):
    """Base of the errors a client may see. `param` names the field at fault."""

    status: ClassVar[int]
    number: ClassVar[int]
    code: ClassVar[str]
    text: ClassVar[str]
    """The message when there is nothing more particular to say."""

    def __init__(
        self, message: str | None = None, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        # Every argument goes to `args`, so that the error survives a process boundary.
        super().__init__(message, param, retry_after_s)
        self.message = message or self.text
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        """The coarse class that client libraries show as `type`."""
        return _KIND_BY_STATUS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )


_KIND_BY_STATUS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class MissingBody(ApiError):
    status, number, code = 400, 3003, "missing_body"
    text = "The request has no body; a JSON object is expected."


class InvalidRequest(ApiError):
    status, number, code = 400, 5006, "invalid_request"
    text = "AiError: Bad input."


class NoSuchModel(ApiError):
    status, number, code = 400, 5007, "no_such_model"
    text = "No such model or task."


class ContextOverflow(ApiError):
    status, number, code = 400, 5021, "context_length_exceeded"
    text = "The prompt and the answer do not fit into the model's context."

    @staticmethod
    def of(
        prompt_tokens: int, output_tokens: int, context_length: int, *, param: str | None = None
    ) -> "ContextOverflow":
        """Worded so that clients which parse either known phrase find both numbers."""
        total = prompt_tokens + output_tokens
        return ContextOverflow(
            f"AiError: This model's maximum context length is {context_length} tokens. However, you "
            f"requested {total} tokens ({prompt_tokens} in the messages, {output_tokens} in the completion): "
            f"the estimated number of input and maximum output tokens ({total}) exceeded this model context "
            f"window limit ({context_length}).",
            param,
        )


class InvalidApiKey(ApiError):
    status, number, code = 401, 10000, "invalid_api_key"
    text = "Authentication error: the API key is missing, unknown, revoked or expired."


class ForeignAccount(ApiError):
    status, number, code = 403, 10000, "account_forbidden"
    text = "Authentication error: the API key does not belong to this account."


class ModelForbidden(ApiError):
    status, number, code = 403, 5018, "model_not_allowed"
    text = "The API key is not allowed to use this model."


class NoRoute(ApiError):
    status, number, code = 404, 7003, "not_found"
    text = "Could not route to this path."


class ModelNotFound(ApiError):
    status, number, code = 404, 3042, "model_not_found"
    text = "The model does not exist."


class MethodNotAllowed(ApiError):
    status, number, code = 405, 7001, "method_not_allowed"
    text = "The method is not supported on this path."


class DeadlineExceeded(ApiError):
    status, number, code = 408, 3007, "timeout"
    text = "The request did not finish in time."


class RequestIncomplete(ApiError):
    status, number, code = 408, 3008, "request_incomplete"
    text = "The request did not arrive in time."


class BodyTooLarge(ApiError):
    status, number, code = 413, 3006, "request_too_large"
    text = "The request body is too large."


class UnsupportedEncoding(ApiError):
    status, number, code = 415, 5008, "unsupported_encoding"
    text = "The request body must be sent as it is, without content-encoding."


class OutOfCapacity(ApiError):
    status, number, code = 429, 3040, "capacity_exceeded"
    text = "Capacity temporarily exceeded, please try again."


class HeadersTooLarge(ApiError):
    status, number, code = 431, 5009, "headers_too_large"
    text = "The request's headers are too large."


class InternalError(ApiError):
    status, number, code = 500, 5000, "internal_error"
    text = "An internal error occurred."


class EngineFailed(ApiError):
    status, number, code = 500, 5001, "engine_failed"
    text = "The inference engine could not complete the request."


class PageIntegrity(ApiError):
    status, number, code = 500, 5010, "page_integrity"
    text = "A cache page of the request was not its own; the request was stopped before it was used."


class ContractMismatch(ApiError):
    status, number, code = 500, 5011, "contract_mismatch"
    text = "The engines do not serve the same model; the request was stopped before it was answered."


class EngineLost(ApiError):
    status, number, code = 502, 7010, "engine_lost"
    text = "The inference engine went away while it worked on the request."


class StreamIncomplete(ApiError):
    status, number, code = 502, 7011, "stream_incomplete"
    text = "Part of the answer was lost on the way and could not be recovered."


class GatewayLost(ApiError):
    status, number, code = 502, 7014, "gateway_lost"
    text = "The gateway went away while it worked on the request."


class GatewayUnavailable(ApiError):
    status, number, code = 503, 7016, "gateway_unavailable"
    text = "No gateway is ready."


class GatewaySilent(ApiError):
    status, number, code = 504, 7015, "gateway_silent"
    text = "The gateway did not answer in time."


class EnginesUnavailable(ApiError):
    status, number, code = 503, 7009, "engines_unavailable"
    text = "No inference engine is ready."


class ShuttingDown(ApiError):
    status, number, code = 503, 7013, "shutting_down"
    text = "The service is shutting down; please try again."


class StateUnavailable(ApiError):
    status, number, code = 503, 7012, "state_unavailable"
    text = "The key store cannot be reached."


FAULT_TO_ERROR: Final[Mapping[FaultKind, type[ApiError]]] = {
    FaultKind.BUSY: OutOfCapacity,
    FaultKind.DRAINING: ShuttingDown,
    FaultKind.DEADLINE: DeadlineExceeded,
    FaultKind.PEER_UNKNOWN: EngineFailed,
    FaultKind.INVALID_REQUEST: InternalError,
    FaultKind.ENGINE_DEAD: EngineLost,
    FaultKind.CANCELLED: EngineLost,
    FaultKind.PAGE_INTEGRITY: PageIntegrity,
    FaultKind.CONTRACT_MISMATCH: ContractMismatch,
    FaultKind.INTERNAL: EngineFailed,
}

RETRY_AFTER_S: Final = 1
"""Seconds named to clients that met a full or absent pool: both change within a step or two."""


DRAIN_RETRY_AFTER_S: Final = 5
"""Seconds named to clients that met a part of the system on its way out."""


def for_fault(kind: FaultKind) -> ApiError:
    """What the client is told about a worker's fault."""
    error = FAULT_TO_ERROR[kind]
    if error is ShuttingDown:
        return error(retry_after_s=DRAIN_RETRY_AFTER_S)
    return error(retry_after_s=RETRY_AFTER_S if error.status in (429, 503) else None)
