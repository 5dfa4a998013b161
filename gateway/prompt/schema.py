"""Bodies of both dialects: strict, closed, and turned into one record."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.errors import InvalidRequest
from workers.api import Sampling

MAX_STOPS: Final = 4
MAX_COUNT: Final = 2**63 - 1
"""Of any number of tokens. Python refuses to write out what is much longer, also into an error."""
UNSUPPORTED: Final = frozenset(
    {
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "response_format",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "lora",
        "image",
        "text",
        "audio",
        "modalities",
        "web_search_options",
        "tool_calls",
        "tool_call_id",
    }
)
"""Known words of the two dialects that this server cannot honour: refused as such, not as typos."""


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can take it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class TextPart(_Closed):
    type: Literal["text"]
    text: Text


def _content_form(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<string>"


Content = Annotated[
    Annotated[Text, Tag("<string>")] | Annotated[list[TextPart], Tag("<parts>"), Field(min_length=1)],
    Discriminator(_content_form),
]


class ChatMessage(_Closed):
    role: Literal["system", "user", "assistant"]
    content: Content


class StreamOptions(_Closed):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted without effect


class TemplateOptions(_Closed):
    """Accepted without effect where the model has no thinking mode."""

    thinking: bool = False
    enable_thinking: bool = False
    clear_thinking: bool = False


class Options(_Closed):
    rejectIfBusy: bool = False  # noqa: N815 - the wire's spelling


def _stop_form(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<string>"


StopString = Annotated[Text, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Tag("<list>"), Field(max_length=MAX_STOPS)],
    Discriminator(_stop_form),
]


class _Common(_Closed):
    """Fields of both dialects."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: float | None = Field(default=None, ge=0, le=5)
    top_p: float = Field(default=1.0, ge=0.001, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: Stop = []
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    n: Literal[1] = 1
    cache_salt: Text | None = Field(default=None, min_length=1, max_length=256)
    options: Options = Options()
    # Accepted without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False
    service_tier: str | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()


class RunBody(_Common):
    """`POST ai/run/{model}`."""

    model: str | None = None
    prompt: Text | None = Field(default=None, min_length=1)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    raw: bool = False


class ChatBody(_Common):
    """`POST chat/completions`."""

    model: str = Field(min_length=1)
    messages: list[ChatMessage] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A validated request, whichever dialect it came in."""

    model: str | None
    """As named in the body."""
    messages: tuple[dict[str, Any], ...]
    """Empty when `raw_prompt` is set."""
    raw_prompt: str | None
    prompt_field: str
    """Which field of the body holds the prompt."""
    max_tokens: int | None
    sampling: Sampling
    """Its `max_tokens` is a placeholder until the prompt is counted."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    cache_salt: str | None


def parse_run(body: dict[str, Any]) -> Ask:
    """Raises `InvalidRequest` that names the field."""
    parsed = _parse(RunBody, body)
    if parsed.prompt is not None and parsed.messages is not None:
        raise bad_input("oneOf at '/' not met: give 'prompt' or 'messages', not both", "prompt")
    if parsed.prompt is None and parsed.messages is None:
        raise bad_input("required properties at '/' are 'prompt' or 'messages'", "messages")
    if parsed.raw and parsed.prompt is None:
        raise bad_input("'/raw' needs '/prompt'", "raw")
    messages = parsed.messages
    if parsed.prompt is not None and not parsed.raw:
        messages = [ChatMessage(role="user", content=parsed.prompt)]
    return _ask(parsed, parsed.model, messages or [], parsed.prompt if parsed.raw else None, temperature=0.6)


def parse_chat(body: dict[str, Any]) -> Ask:
    """Raises `InvalidRequest` that names the field."""
    parsed = _parse(ChatBody, body)
    return _ask(parsed, parsed.model, parsed.messages, None, temperature=1.0)


def bad_input(what: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"AiError: Bad input: Error: {what}", param)


def _ask(
    body: _Common,
    model: str | None,
    messages: list[ChatMessage],
    raw_prompt: str | None,
    *,
    temperature: float,
) -> Ask:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_input("give '/max_tokens' or '/max_completion_tokens', not both", "max_completion_tokens")
    return Ask(
        model=model,
        messages=tuple(message.model_dump() for message in messages),
        raw_prompt=raw_prompt,
        prompt_field="messages" if getattr(body, "prompt", None) is None else "prompt",
        max_tokens=body.max_tokens if body.max_tokens is not None else body.max_completion_tokens,
        sampling=Sampling(
            max_tokens=0,
            temperature=temperature if body.temperature is None else body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=body.seed,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
        ),
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        cache_salt=body.cache_salt,
    )


Body = TypeVar("Body", bound=_Common)


def _parse(form: type[Body], body: dict[str, Any]) -> Body:
    try:
        return form.model_validate(_without_nulls(body))
    except ValidationError as bad:
        raise _first(bad.errors(include_url=False, include_input=False)) from None


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Clients send `null` for what they leave open: at the top, in options, in messages and their parts."""
    kept = {key: _filled(value) for key, value in body.items() if value is not None}
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_filled(message) for message in messages]
        for message in kept["messages"]:
            if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
                message["content"] = [_filled(part) for part in parts]
    return kept


def _filled(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


_TAGS: Final = frozenset({"<string>", "<parts>", "<list>"})
"""Steps that pydantic adds for the branch of a union: no part of the body."""


def _first(errors: list[ErrorDetails]) -> InvalidRequest:
    """The first error in upstream's words. Only names of fields are repeated, cut short; never values."""
    error = errors[0]
    first, *rest = error["loc"]
    steps = [first, *(step for step in rest if step not in _TAGS)]
    path = "/" + "/".join(_printable(step) for step in steps)
    name = _param(steps)
    if error["type"] == "missing":
        parent = "/" + "/".join(map(_printable, steps[:-1]))
        return bad_input(f"required properties at '{parent}' are '{_printable(steps[-1])}'", name)
    if error["type"] == "extra_forbidden":
        if steps[-1] in UNSUPPORTED:
            return bad_input(f"'{path}' is not supported by this model", name)
        return bad_input(f"'{path}' is not a known property", name)
    return bad_input(f"'{path}' {_phrase(error)}", name)


_PHRASES: Final = {
    "less_than_equal": "must be <= {le:g}",
    "greater_than_equal": "must be >= {ge:g}",
    "greater_than": "must be > {gt:g}",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode text",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be a boolean",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} items",
}
"""By pydantic's error type. None of the values comes from the client."""


def _phrase(error: ErrorDetails) -> str:
    return _PHRASES.get(error["type"], "is not valid").format(**error.get("ctx", {}))


def _printable(step: int | str) -> str:
    return str(step).encode("ascii", "replace").decode()[:64]


def _param(steps: list[int | str]) -> str:
    """`messages[0].content`"""
    name = ""
    for step in steps:
        name += f"[{step}]" if isinstance(step, int) else f".{_printable(step)}" if name else _printable(step)
    return name
