"""What vLLM says to a profile's arguments, before there are weights, a GPU or an engine. Imports vLLM."""

import contextlib
import io
import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from workers.profile.schema import ModelProfile


def refusal(words: Sequence[str]) -> str | None:
    """Why vLLM's own command line does not take these words; None: it does."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command_parser().parse_args(list(words))
    except SystemExit:
        return (
            " ".join(said.getvalue().rpartition("error: ")[2].split()) or "vLLM refuses them without a word"
        )
    except ValueError as bad:
        return " ".join(str(bad).split())
    return None


def unknown_parsers(profile: ModelProfile) -> Iterator[str]:
    """Names of parsers that this vLLM does not have, each with what it has."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, name, known in (
        ("tool_parser", profile.tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", profile.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            near = get_close_matches(name, known, n=3) or known
            yield f"{key}: vLLM has no {name!r}; the nearest are {', '.join(near)}"


def version() -> str:
    import vllm

    return str(vllm.__version__)


def shown(words: Sequence[str]) -> Iterator[str]:
    """The words as they would be typed, one option with its value on each line."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    if line:
        yield shlex.join(line)


@cache
def command_parser() -> Any:
    """vLLM's own, of every option that an engine has."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", allow_abbrev=False))
