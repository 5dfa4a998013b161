"""`python -m load COMMAND --json FILE`: every figure in the documents comes from here."""

import argparse
import json
import sys
from pathlib import Path

from load import path


def main() -> int:
    """Exit status 0 only for a valid run."""
    parser = argparse.ArgumentParser(prog="python -m load")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("path", help="the split path next to one plain vLLM engine")
    compare.add_argument("--profile", choices=sorted(path.DTYPES), default="exact")
    compare.add_argument("--model-dir", type=Path, required=True, help="folder of the prepared model")
    compare.add_argument("--words", type=int, nargs="+", default=[16, 100, 400], help="prompt sizes")
    compare.add_argument("--max-tokens", type=int, default=24)
    compare.add_argument("--rounds", type=int, default=9, help="requests per size and system")
    compare.add_argument("--seed", type=int, default=1)
    compare.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    document, valid = path.run(options)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")
    print(json.dumps(document["summary"], indent=2))
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
