"""The `phasegate` command: arguments in, one clear line out when something is wrong."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy import commands
from deploy.chat import ChatError
from deploy.control import ControlError
from deploy.detach import DetachError
from deploy.logs import log_to_stream
from deploy.model_store import ModelError
from deploy.redis_server import RedisError
from deploy.signals import StopRequested
from deploy.state import StateError
from deploy.tenants import TenantError
from deploy.trace_view import TraceError
from deploy.yaml_file import ConfigError

EXPECTED = (
    ChatError,
    ConfigError,
    ControlError,
    DetachError,
    ModelError,
    RedisError,
    StateError,
    TenantError,
    TraceError,
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="phasegate", description="Serverless LLM inference on this machine.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    up = _verb(verbs, "up", "start the system and serve until Ctrl-C", commands.up)
    _configured(up)
    up.add_argument("--detach", action="store_true", help="return when ready; serve in the background")
    _state(up)

    _state(_verb(verbs, "down", "stop the system", commands.down))

    status = _verb(verbs, "status", "show replicas and gateways", commands.status)
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument(
        "--integrity", action="store_true", help="what each replica checks of its pages, and what it found"
    )
    _state(status)

    trace = _verb(verbs, "trace", "show where one request spent its time", commands.trace)
    trace.add_argument("request", metavar="REQUEST_ID", help="its id, or the x-request-id of its answer")
    trace.add_argument("--json", action="store_true", help="as JSON")
    _state(trace)

    _debug(verbs)

    chat = _verb(verbs, "chat", "talk to the running model", commands.chat)
    chat.add_argument("message", nargs="?", help="one message; without it, a conversation")
    chat.add_argument("--max-tokens", type=_positive, default=256)
    chat.add_argument("--temperature", type=float, default=0.0, help="0 (the default): always the likeliest")
    _state(chat)

    _configuration(verbs)

    _calibrate(verbs)

    key = verbs.add_parser("key", help="API keys of the running system")
    keys = key.add_subparsers(dest="key_verb", required=True, metavar="COMMAND")
    create = _verb(keys, "create", "make a key; it is shown once", commands.key_create)
    create.add_argument("--account", help="name or id of the account; made if it is new")
    create.add_argument("--models", nargs="+", default=[], metavar="ID", help="only these models")
    create.add_argument("--expires", metavar="WHEN", help="like 30d, 12h, or a date")
    _state(create)
    _state(_verb(keys, "list", "list accounts and keys", commands.key_list))
    revoke = _verb(keys, "revoke", "make a key void", commands.key_revoke)
    revoke.add_argument("id", help="the key's id, as `key list` shows it")
    _state(revoke)

    model = verbs.add_parser("model", help="models on this machine")
    models = model.add_subparsers(dest="model_verb", required=True, metavar="COMMAND")
    prepare = _verb(models, "prepare", "make an embedded model ready", commands.model_prepare)
    prepare.add_argument("name")
    prepare.add_argument("--verify", action="store_true", help="check every byte against the record")
    add = _verb(models, "add", "register a model folder", commands.model_add)
    add.add_argument("path", type=Path)
    add.add_argument("--name", help="name of its profile (default: the folder's)")
    _verb(models, "list", "list model profiles", commands.model_list)
    return top


def _configuration(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    config = verbs.add_parser("config", help="the configuration, before anything is started")
    configs = config.add_subparsers(dest="config_verb", required=True, metavar="COMMAND")
    check = _verb(configs, "check", "tell everything that stands in a start's way", commands.config_check)
    _configured(check)
    _state(check)
    _configured(_verb(configs, "show", "show every value and where it comes from", commands.config_show))

    look = _verb(verbs, "preflight", "look at what a start needs, without one", commands.preflight_check)
    _configured(look)
    look.add_argument(
        "--dry-run",
        action="store_true",
        help="of the profile alone: what vLLM would be told, and whether it takes that",
    )
    _state(look)


def _calibrate(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = "measure a model's keys and values, and write the scales of an FP8 cache"
    calibrate = _verb(verbs, "calibrate", about, commands.calibrate)
    calibrate.add_argument("--profile", required=True, help="model profile: a name or a file")
    calibrate.add_argument(
        "--text", type=Path, metavar="FILE", help="what to measure with (default: a sample)"
    )
    calibrate.add_argument("--out", type=Path, metavar="FILE", required=True, help="scale file to write")


def _debug(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    debug = verbs.add_parser("debug", help="a look into the running system")
    debugs = debug.add_subparsers(dest="debug_verb", required=True, metavar="COMMAND")
    ledger = _verb(debugs, "ledger", "show who has which cache page, by ids", commands.debug_ledger)
    ledger.add_argument("replica", nargs="?", metavar="REPLICA", help="as `status` names it; default: all")
    ledger.add_argument("--json", action="store_true", help="as JSON")
    _state(ledger)


def _verb(
    among: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    act: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    made = among.add_parser(name, help=text, description=text)
    made.set_defaults(act=act)
    return made


def _configured(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--profile", help="model profile: a name (see `model list`) or a file")
    verb.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    verb.add_argument("--port", type=int, help="HTTP port (default 8600)")
    verb.add_argument("--internal-port", type=int, help="port for metrics and traces (default 8601; 0: none)")


def _state(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--state", type=Path, metavar="DIR", help="state folder of this system")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed with one clear message, 2 wrong arguments, 130 told to stop."""
    options = parser().parse_args(arguments)
    log_to_stream(sys.stderr)
    try:
        status: int = options.act(options)
    except EXPECTED as bad:
        print(f"phasegate: error: {bad}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, StopRequested):
        print("phasegate: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads; say nothing more
        return 1
    except OSError as bad:
        print(f"phasegate: error: {bad}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
