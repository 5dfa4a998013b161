import ast
import json
import re
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import bootstrap
from deploy.bootstrap import (
    LOCK_NAME,
    NEEDED_BYTES,
    Machine,
    SetupError,
    check_machine,
    check_torch,
    find_python,
    fingerprint,
    only_one,
    pinned,
    run_logged,
)

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements" / LOCK_NAME).read_text()
GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    flags=frozenset({"avx2", "avx512f"}),
    free_bytes=NEEDED_BYTES,
)


def test_a_complete_machine_gets_no_notice() -> None:
    assert check_machine(GOOD) == []


def test_without_avx512_set_up_says_what_still_works_and_goes_on() -> None:
    (notice,) = check_machine(replace(GOOD, flags=frozenset({"avx2"})))

    assert "everything runs" in notice
    assert "exact" in notice
    assert "FP8" in notice
    assert "smollm2-135m-bf16" in notice


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (replace(GOOD, system="Darwin"), "macOS is not supported"),
        (replace(GOOD, system="Windows"), "Windows is not supported"),
        (replace(GOOD, architecture="aarch64"), "aarch64 is not supported"),
        (replace(GOOD, flags=frozenset({"sse4_2"})), "no AVX2"),
        (replace(GOOD, free_bytes=NEEDED_BYTES - 1), "not enough disk"),
    ],
)
def test_a_machine_on_which_nothing_works_is_refused_in_one_line(machine: Machine, said: str) -> None:
    with pytest.raises(SetupError, match=said) as refused:
        check_machine(machine)
    assert "\n" not in str(refused.value)


def test_the_first_complete_python_is_taken() -> None:
    answers = {"/a": "3.11 without venv", "/b": "3.12 complete", "/c": "3.11 complete", "/d": "3.11 complete"}

    chosen = find_python(
        ["absent", "a", "b", "c", "d"], lambda n: f"/{n}" if len(n) == 1 else None, answers.get
    )

    assert chosen == "/c"


def test_without_a_fitting_python_the_message_lists_what_there_is() -> None:
    with pytest.raises(SetupError, match=r"Python 3\.11 .*found python3 \(3\.12 complete\)"):
        find_python(["python3.11", "python3"], {"python3": "/p"}.get, lambda _: "3.12 complete")


def report(*versions: str) -> str:
    return json.dumps({"install": [{"metadata": {"version": version}} for version in versions]})


def test_a_cpu_build_of_torch_passes() -> None:
    check_torch(report("2.13.0+cpu"), "2.13.0+cpu")


@pytest.mark.parametrize("found", [("2.13.0",), ("2.13.0+cu130",), ("2.12.0+cpu",), ()])
def test_any_other_build_of_torch_is_refused_with_the_remedy(found: tuple[str, ...]) -> None:
    with pytest.raises(SetupError, match=r"PIP_EXTRA_INDEX_URL.*PIP_FIND_LINKS") as refused:
        check_torch(report(*found), "2.13.0+cpu")
    assert "\n" not in str(refused.value)


def test_a_lock_that_does_not_pin_a_cpu_build_is_refused() -> None:
    with pytest.raises(SetupError):
        check_torch(report("2.13.0"), "2.13.0")


def test_the_lock_pins_every_requirement_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [
        re.split(r"[\[<>=]", line)[0] for line in (*project["dependencies"], *extras["cpu"], *extras["dev"])
    ]

    assert [name for name in names if not pinned(LOCK, name)] == []


def test_the_lock_holds_nothing_of_cuda_and_none_of_the_packages_that_do_not_fit() -> None:
    names = re.findall(r"^([\w.-]+)==", LOCK, re.MULTILINE)

    assert len(names) > 100
    assert [
        n for n in names if re.match(r"nvidia|cuda|cupy|vllm$|torch(vision|audio|codec)", n.lower())
    ] == []


def test_a_package_that_is_not_in_the_lock_is_named() -> None:
    with pytest.raises(SetupError, match="does not pin leftpad"):
        pinned("torch==1\nnot-leftpad==2\n", "leftpad")


def test_set_up_needs_nothing_that_must_be_installed_first() -> None:
    tree = ast.parse(Path(bootstrap.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_the_fingerprint_changes_with_the_lock_the_project_and_the_place(tmp_path: Path) -> None:
    def checkout(name: str, lock: str, project: str) -> Path:
        root = tmp_path / name
        (root / "requirements").mkdir(parents=True, exist_ok=True)
        (root / "requirements" / LOCK_NAME).write_text(lock)
        (root / "pyproject.toml").write_text(project)
        return root

    first = fingerprint(checkout("a", "x==1", "name"))

    assert fingerprint(checkout("a", "x==1", "name")) == first
    assert fingerprint(checkout("a", "x==2", "name")) != first
    assert fingerprint(checkout("a", "x==1", "other")) != first
    assert fingerprint(checkout("b", "x==1", "name")) != first


def test_two_set_ups_of_one_checkout_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with only_one(tmp_path / "lock", lambda _: waiting.set()):
            order.append("second")

    other = threading.Thread(target=second)
    with only_one(tmp_path / "lock", order.append):
        other.start()
        assert waiting.wait(10)
        order.append("first")
    other.join(10)

    assert order == ["first", "second"]


def test_a_step_that_fails_is_told_with_its_last_line_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "print('some noise'); print('no such package'); raise SystemExit(3)"

    with pytest.raises(SetupError, match=r"failed installing: no such package .*log"):
        run_logged([sys.executable, "-c", script], log, "installing", lambda _: None)
    assert "some noise" in log.read_text()


def test_a_long_command_is_told_of_now_and_then_with_how_long_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "NOTICE_EVERY_S", 0.05)
    said: list[str] = []

    run_logged(["/bin/sleep", "0.3"], tmp_path / "log", "installing 3 packages", said.append)

    assert said[1:]
    assert set(said[1:]) == {"... still installing 3 packages (0 s so far)"}
