"""Makes `.venv` from the lock file. Runs before anything is installed: standard library only.

Idempotent: a stamp inside `.venv` holds the hash of what was installed. Two runs at once wait for each
other. Everything that can be known to fail is checked first and told in one line.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK_NAME = "cpu-linux-x86_64-py311.lock"
PYTHON_VERSION = (3, 11)
NEEDED_BYTES = 5 * 1024**3
"""The environment takes 3.8 GB, and pip unpacks wheels beside it."""
NOTICE_EVERY_S = 20.0
COMPILE = (
    "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
)
"""pip compiles one file after the other: 90 of its 220 seconds with 25,500 files. This takes every core. Some
packages bring files that are no Python 3; pip says nothing of them either."""


class SetupError(Exception):
    """Set-up cannot go on. The message is one line that says what to do."""


@dataclass(frozen=True)
class Machine:
    system: str
    architecture: str
    flags: frozenset[str]
    """CPU features as Linux names them."""
    free_bytes: int


def inspect_machine(root: Path) -> Machine:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        flags=frozenset(found.group(1).split()) if found else frozenset(),
        free_bytes=shutil.disk_usage(root).free,
    )


def check_machine(machine: Machine) -> list[str]:
    """Notices about what will not work here.

    Raises:
        SetupError: nothing would work here.
    """
    if machine.system != "Linux":
        name = {"Darwin": "macOS"}.get(machine.system, machine.system)
        raise SetupError(f"{name} is not supported: the engines run on Linux on x86-64 only")
    if machine.architecture not in ("x86_64", "AMD64"):
        raise SetupError(f"processor {machine.architecture} is not supported: the engines need x86-64")
    if "avx2" not in machine.flags:
        raise SetupError("this processor has no AVX2, without which the CPU engine does not start")
    if machine.free_bytes < NEEDED_BYTES:
        raise SetupError(
            f"not enough disk: {machine.free_bytes / 1024**3:.1f} GiB free here, "
            f"{NEEDED_BYTES / 1024**3:.0f} GiB needed for the environment"
        )
    if "avx512f" not in machine.flags:
        return [
            "this processor has no AVX-512: everything runs, BF16 slowly (the float32 profile `exact` is "
            "faster); without an FP8 cache the default profile runs as `smollm2-135m-bf16`"
        ]
    return []


def find_python(
    candidates: Sequence[str], which: Callable[[str], str | None], probe: Callable[[str], str]
) -> str:
    """Path of the first candidate that is the right Python and can make environments.

    Raises:
        SetupError: there is none; the message lists what was found instead.
    """
    wanted = ".".join(map(str, PYTHON_VERSION))
    seen: list[str] = []
    for name in candidates:
        path = which(name)
        if path is None:
            continue
        answer = probe(path)
        if answer == f"{wanted} complete":
            return path
        seen.append(f"{name} ({answer})")
    instead = f"; found {', '.join(seen)}" if seen else ""
    raise SetupError(f"Python {wanted} with the venv module is needed (set PYTHON to its path){instead}")


def probe_python(path: str) -> str:
    """`3.11 complete` for a usable Python 3.11; else what is wrong with it."""
    script = (
        "import sys; v = '%d.%d' % sys.version_info[:2]\n"
        "try: import venv, ensurepip; print(v, 'complete')\n"
        "except ImportError as e: print(v, 'without', e.name)"
    )
    ran = subprocess.run([path, "-c", script], capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else "does not run"


def fingerprint(root: Path) -> str:
    """Changes whenever the environment would have to be made anew."""
    digest = hashlib.sha256(str(root).encode())
    for file in (root / "requirements" / LOCK_NAME, root / "pyproject.toml"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def pinned(lock_text: str, package: str) -> str:
    """The version that the lock pins.

    Raises:
        SetupError: the package is not in it.
    """
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock_text, re.MULTILINE | re.IGNORECASE)
    if not found:
        raise SetupError(f"the lock file does not pin {package}")
    return found.group(1)


def check_torch(report: str, wanted: str) -> None:
    """Refuses anything but a CPU build, from the report of a dry run of pip.

    Raises:
        SetupError: pip would install another build.
    """
    chosen = [item["metadata"]["version"] for item in json.loads(report)["install"]]
    if chosen != [wanted] or not wanted.endswith("+cpu"):
        raise SetupError(_no_cpu_torch(wanted, f"pip would install {', '.join(chosen) or 'nothing'}"))


def _no_cpu_torch(wanted: str, because: str) -> str:
    return (
        f"pip finds no CPU build of torch {wanted.partition('+')[0]} ({because}): add PyTorch's CPU wheel "
        "index through PIP_EXTRA_INDEX_URL, or a folder with the wheel through PIP_FIND_LINKS"
    )


@contextmanager
def only_one(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other set-up of this checkout runs."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_logged(argv: Sequence[str], log: Path, doing: str, say: Callable[[str], None]) -> None:
    """Runs a command with its output in `log`, telling now and then that it still works.

    Raises:
        SetupError: it failed; the message has its last line.
    """
    say(f"{doing} (log: {log})")
    done = threading.Event()

    def notice() -> None:
        began = time.monotonic()
        while not done.wait(NOTICE_EVERY_S):
            say(f"... still {doing} ({time.monotonic() - began:.0f} s so far)")

    teller = threading.Thread(target=notice, daemon=True)
    teller.start()
    try:
        with log.open("a") as out:
            code = subprocess.call(argv, stdout=out, stderr=subprocess.STDOUT)
    finally:
        done.set()
        teller.join()
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise SetupError(
            f"failed {doing}: {lines[-1].strip() if lines else f'exit status {code}'} (see {log})"
        )


def make_environment(root: Path, python: str, say: Callable[[str], None]) -> None:
    """Fills `.venv`: the lock with `--no-deps`, then the project itself.

    Raises:
        SetupError: a step failed. The next run starts over where this one stopped.
    """
    venv, lock = root / ".venv", root / "requirements" / LOCK_NAME
    inside = str(venv / "bin" / "python")
    log = root / ".setup.log"
    log.write_text("")
    if not (venv / "bin" / "python").exists() or probe_python(inside) != "3.11 complete":
        run_logged([python, "-m", "venv", "--clear", str(venv)], log, "making .venv", say)
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--no-deps"]
    pip += ["--no-compile"]

    torch = pinned(lock.read_text(), "torch")
    report = venv / "torch-report.json"
    ask = [*pip, "--dry-run", "--ignore-installed", "--quiet", "--report", str(report), f"torch=={torch}"]
    try:
        run_logged(ask, log, "asking pip for a CPU build of torch", say)
    except SetupError:
        raise SetupError(_no_cpu_torch(torch, f"see {log}")) from None
    check_torch(report.read_text(), torch)

    count = sum(1 for line in lock.read_text().splitlines() if "==" in line)
    run_logged([*pip, "-r", str(lock)], log, f"installing {count} packages, 3.8 GB", say)
    run_logged([inside, "-c", COMPILE], log, "compiling their modules", say)
    run_logged([*pip, "--no-build-isolation", "-e", str(root)], log, "installing the project", say)


def set_up(root: Path, say: Callable[[str], None]) -> None:
    """After this, `.venv` holds exactly the lock and the project.

    Raises:
        SetupError: with one line that says what to do.
    """
    stamp = root / ".venv" / "phasegate-stamp"
    with only_one(root / ".setup.lock", say):
        wanted = fingerprint(root)
        machine = inspect_machine(root)
        if stamp.exists() and stamp.read_text() == wanted and (root / ".venv/bin/python").exists():
            return
        for notice in check_machine(machine):
            say(notice)
        names = [name for name in (os.environ.get("PYTHON"), "python3.11", "python3") if name]
        python = find_python([*names, sys.executable], shutil.which, probe_python)
        make_environment(root, python, say)
        stamp.write_text(wanted)
        say("ready")


def main() -> int:
    def say(line: str) -> None:
        sys.stderr.write(f"setup: {line}\n")
        sys.stderr.flush()

    try:
        set_up(Path(__file__).resolve().parents[1], say)
    except SetupError as problem:
        say(f"error: {problem}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
