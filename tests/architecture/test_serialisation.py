"""Nothing outside Ray turns bytes into objects by running them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    p for d in ("gateway", "workers", "kv_transfer", "load", "deploy") for p in (ROOT / d).rglob("*.py")
)
UNPICKLES = re.compile(
    r"\b(?:c?pickle|cloudpickle|dill|marshal|shelve)\b|\b(?:send|recv|broadcast|scatter|gather)\w*_(?:py)?obj\w*"
    r"|\btorch\.load\(|\ballow_pickle=True"
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_uses_pickle_or_a_helper_that_does(source: Path) -> None:
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", source.read_text())

    assert not UNPICKLES.findall(code)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "socket.send_pyobj(x)",
        "group.recv_obj(0)",
        "dist.broadcast_object_list([x])",
        "torch.load(f)",
    ],
)
def test_the_pattern_finds_them(line: str) -> None:
    assert UNPICKLES.search(line)
