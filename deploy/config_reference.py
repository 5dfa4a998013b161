"""Writes `docs/configuration.md` from the schema: its types, defaults and docstrings."""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types

from deploy import production
from deploy.config import SystemConfig
from workers.profile.schema import ModelProfile

COMMAND: Final = "python -m deploy.config_reference > docs/configuration.md"


PAGE: Final = """\
# Configuration

Generated from the schema by `{command}`; a test compares the two.

One optional YAML file, given with `--config`. What the command line says stands above the file, the file
above the defaults. `phasegate config show` prints the values in force and where each comes from.
`phasegate config check` tells, all at once and with exit status 1, every mistake in the file, every refusal
of mode `production`, and what on this machine stands in the way of a start: model profile and folder, ports,
state folder, disk, shared memory. Unknown keys and keys given twice are mistakes.

## The system

{system}

## Mode `production`

Refused, each with its remedy and all at once:

| what | unless |
|---|---|
| any key below `testing` | it is removed |
| a `host` other than loopback | `expose: true` says that it is meant |
| a `dashboard.host` other than loopback | it is loopback or null |
| `redis.state_url` without a password, or with a weak one | a unix socket is used |
| a weak `redis_password` or `pepper` in `secrets.json` | a strong one is made |
| a profile with `engine: scripted` | the profile has a real engine |
| a profile with `integrity: off` | pages are checked |

Weak: shorter than {shortest} characters, fewer than {fewest} different ones, or one of {words} inside.

## Model profiles

A file of its own, named by `profile`; `phasegate model add` writes one for a model folder.

{profile}
"""


def document() -> str:
    """The whole page."""
    return PAGE.format(
        command=COMMAND,
        system="\n".join(_tables(SystemConfig)),
        shortest=production.SHORTEST_SECRET,
        fewest=production.FEWEST_CHARACTERS,
        words=", ".join(f"`{word}`" for word in production.KNOWN_WORDS),
        profile="\n".join(_tables(ModelProfile)),
    )


def _sections(root: type[Any]) -> dict[type[Any], list[str]]:
    """Every section below `root`, from the top down, with the paths under which it stands."""
    found: dict[type[Any], list[str]] = {root: [""]}
    waiting = [root]
    for section in waiting:
        hints = get_type_hints(section, include_extras=True)
        for part in fields(section):
            if (inner := _section(hints[part.name])) is None:
                continue
            path = f"{found[section][0]}.{part.name}".lstrip(".")
            if inner in found:
                found[inner].append(path)
            else:
                found[inner] = [path]
                waiting.append(inner)
    return found


def _section(kind: Any) -> type[Any] | None:
    """The section that a field of this type holds, or may hold."""
    among = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((one for one in among if hasattr(one, "__dataclass_fields__")), None)


def _tables(root: type[Any]) -> Iterator[str]:
    """A table for each section; the same section under two names is described once."""
    for section, names in _sections(root).items():
        if names != [""]:
            yield ""
            yield "### " + " and ".join(f"`{name}`" for name in names)
            yield ""
        about = " ".join((inspect.getdoc(section) or "").split())
        if about:
            yield about
            yield ""
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        hints, told = get_type_hints(section, include_extras=True), docstrings(section)
        for part in fields(section):
            yield _row(part, hints[part.name], told.get(part.name, ""))


def _row(part: Field[Any], kind: Any, meaning: str) -> str:
    nested, optional = _section(kind) is not None, type(None) in get_args(kind)
    required = part.default is MISSING and part.default_factory is MISSING
    default = "required" if required else "" if nested and not optional else f"`{_plain(part.default)}`"
    value = words(kind) if not nested else "a section, below, or `null`" if optional else "a section, below"
    return f"| `{part.name}` | {value} | {default} | {meaning} |"


def words(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, *marks = arguments
        bounds = " ".join(filter(None, map(_bound, marks)))
        return f"{words(inner)} {bounds}".strip()
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(words(one) for one in arguments)
    if origin is tuple:
        return f"list of {words(arguments[0])}"
    return {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}.get(kind, "`null`")


def _bound(mark: Any) -> str:
    match mark:
        case annotated_types.Ge(ge=least):
            return f"from {least}"
        case annotated_types.Gt(gt=below):
            return f"above {below}"
        case annotated_types.Le(le=most):
            return f"to {most}"
        case annotated_types.MultipleOf(multiple_of=step):
            return f"in steps of {step}"
        case _:
            pattern = getattr(mark, "pattern", None)
            return "" if pattern is None else f"like `{pattern}`".replace("|", "\\|")


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def docstrings(section: type[Any]) -> dict[str, str]:
    """What stands beneath each field of a class, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    found = {}
    for field, after in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = " ".join(after.value.value.split()).replace("|", "\\|")
    return found


if __name__ == "__main__":
    sys.stdout.write(document())
