"""`python -m load COMMAND --json FILE`: each command measures one claim. Exits 0 only if the run is valid."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load import formats, gateway_cost, integrity_cost, path, planner, sweep
from load.geometry import GeometryError
from load.servers import ServerFailed
from load.stacks import SamplerMissing


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m load", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, help_ in (
        ("path", path, "the whole path next to one plain vLLM server"),
        ("gateway-cost", gateway_cost, "processor time of a token's way, token bus next to Serve handle"),
        ("integrity-cost", integrity_cost, "an engine that checks its pages next to itself without"),
        ("sweep", sweep, "one server under rising load, or Phasegate next to plain vLLM"),
        ("formats", formats, "formats of decode's cache: accuracy, tokens that fit, throughput"),
        ("plan", planner, "how much the engines of a profile hold, and how fast they decode at most"),
    ):
        command = commands.add_parser(name, help=help_, allow_abbrev=False)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
        command.add_argument("--seed", type=int, default=1)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result, valid = options.run(options, list(arguments))
    except (SamplerMissing, ServerFailed, GeometryError, planner.PlanError) as bad:
        print(f"load: error: {bad}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load: stopped", file=sys.stderr)
        return 130
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 0 if valid else 1


def _interrupt(*_: object) -> None:
    """Told to stop by a time limit: the servers must be stopped too."""
    raise KeyboardInterrupt


def show(result: dict[str, Any]) -> None:
    if "table" in result:
        print(result["table"])
    else:
        for row in [
            *result["rows"],
            *result.get("cpu", ()),
            *result.get("busy", ()),
            *result.get("micro", ()),
        ]:
            print("  ".join(f"{key}={value}" for key, value in row.items()))
        print(json.dumps(result["summary"], indent=1))
    if invalid := result["summary"]["invalid"]:
        print(f"load: the run is not valid: {'; '.join(map(str, invalid))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
