"""Reading a request body as one JSON object."""

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from starlette.requests import Request

from gateway.errors import InvalidRequest, MissingBody, UnsupportedEncoding
from gateway.prompt.schema import bad_input

PLAIN: Final[Mapping[str, frozenset[str]]] = {
    "content-encoding": frozenset({"", "identity"}),
    "transfer-encoding": frozenset({"", "identity", "chunked"}),
}
"""Words under which a body arrives as it is. No client library compresses one; a few bytes may hide many."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body's object.

    Raises:
        MissingBody: there is none.
        UnsupportedEncoding: it is compressed.
        InvalidRequest: it is not UTF-8, not JSON, nested beyond reason, names a key twice, or is no object.
    """
    for header, plain in PLAIN.items():
        if any(
            word not in plain for word in request.headers.get(header, "").lower().replace(" ", "").split(",")
        ):
            raise UnsupportedEncoding(param=header)
    return parse_object(await request.body())


def parse_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise MissingBody
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise bad_input("the body is not valid UTF-8", None) from None
    except RecursionError:
        raise bad_input("the body is nested too deeply", None) from None
    except ValueError as bad:
        where = f" at character {bad.pos}" if isinstance(bad, json.JSONDecodeError) else ""
        raise bad_input(f"the body is not valid JSON{where}", None) from None
    if not isinstance(value, dict):
        raise bad_input("'/' must be an object", None)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two values for one key: whichever were taken, somebody who checked the other was deceived."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequest("AiError: Bad input: Error: an object in the body names a key twice")
    return found


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError("NaN and Infinity are not JSON")
