"""The state folder of one system: what lies in it, who holds it, and its secrets.

The folder is private (0700), its files too (0600). `lock` is held by the supervisor for as long as it
lives; `runtime.json` tells the commands where to find it; `local.json` exists only while it is ready.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

SOCKET_PATH_LIMIT = 100
"""Bytes; the kernel's limit for a unix socket's path is 107."""


LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.02
"""Whoever looks whether a supervisor lives holds the lock for an instant: see `held`."""
SCRATCH_ROOT: Final = Path("/tmp")
"""Its path is short: Ray's sockets lie below."""


class StateError(Exception):
    """The state folder cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StateDir:
    root: Path

    @property
    def marker(self) -> str:
        """Marks, in their environment, the processes that belong to this folder."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:32]

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets.json"

    @property
    def gateway_secrets(self) -> Path:
        """Read inside the gateway replica: where Redis is, and the pepper."""
        return self.root / "gateway-secrets.json"

    @property
    def ray_token(self) -> Path:
        return self.root / "ray-token"

    @property
    def internal_token(self) -> Path:
        """Without it nobody is answered on the internal port."""
        return self.root / "internal-token"

    @property
    def runtime(self) -> Path:
        return self.root / "runtime.json"

    @property
    def local(self) -> Path:
        return self.root / "local.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def redis(self) -> Path:
        return self.root / "redis"


def open_state(root: Path) -> StateDir:
    """Makes the folder if needed, and makes it private.

    Raises:
        StateError: it is not ours, or cannot be made.
    """
    root = root.expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        root = root.resolve()
        if root.stat().st_uid != os.getuid():
            raise StateError(f"state folder {root} belongs to another user")
        root.chmod(0o700)
        state = StateDir(root)
        state.logs.mkdir(exist_ok=True, mode=0o700)
    except OSError as bad:
        raise StateError(f"state folder {root}: {bad.strerror}") from None
    return state


class StateLock:
    """Held from start to end by the one supervisor of a state folder."""

    def __init__(self, state: StateDir, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._path = state.lock
        self._root = state.root
        self._sleep = sleep
        self._file = self._path.open("a+")

    def acquire(self) -> None:
        """Take the lock and write our pid into it.

        Raises:
            StateError: another process holds it; the message has its pid.
        """
        if not self._taken():
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            raise StateError(
                f"already running with state folder {self._root} (pid {holder}): "
                "stop it with `phasegate down`, or choose another folder with --state"
            )
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _taken(self) -> bool:
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            self._sleep(LOCK_PAUSE_S)
        return False

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two holders in."""
        if not self._file.closed:
            self._file.close()


def held(state: StateDir) -> bool:
    """Whether a supervisor lives in this folder."""
    if not state.lock.exists():
        return False
    with state.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def write_private(path: Path, value: dict[str, Any]) -> None:
    """Replace the file at once, readable by its owner only."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made 0600
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_private(path: Path) -> dict[str, Any]:
    """The JSON object in a private file.

    Raises:
        StateError: it is missing, damaged, or readable by others.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise StateError(f"{path} is readable by others (mode {mode:o}): run `chmod 600` on it")
        loaded = json.loads(path.read_text())
    except OSError as bad:
        raise StateError(f"{path}: {bad.strerror}") from None
    except ValueError:
        raise StateError(f"{path} is damaged: not JSON") from None
    if not isinstance(loaded, dict):
        raise StateError(f"{path} is damaged: not a JSON object")
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """Made once for each state folder. Hexadecimal."""

    redis_password: str = field(repr=False)
    pepper: str = field(repr=False)
    """Key under which API keys are hashed: without it every key is void."""


def load_or_create_secrets(state: StateDir) -> Secrets:
    """The folder's secrets; made at the first start.

    Raises:
        StateError: the file is damaged or readable by others. It is never replaced then.
    """
    if not state.secrets.exists():
        fresh = Secrets(redis_password=secrets.token_hex(32), pepper=secrets.token_hex(32))
        write_private(state.secrets, asdict(fresh))
    raw = read_private(state.secrets)
    try:
        return Secrets(**raw)
    except TypeError:
        raise StateError(f"{state.secrets} is damaged: it must hold redis_password and pepper") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where a running supervisor is to be found, and what it must not leave behind."""

    pid: int
    control_socket: str
    scratch: str
    """Short temporary folder: Ray's sockets, and ours when the state folder's path is long."""


def scratch_prefix(state: StateDir) -> str:
    """Begins the name of every scratch folder of this state folder, so that none is ever lost."""
    return f"phasegate-{state.marker[:8]}-"


def scratch_folders(state: StateDir) -> Iterator[Path]:
    """Those that are there: of a running supervisor, or left by one that was killed."""
    for folder in SCRATCH_ROOT.glob(f"{scratch_prefix(state)}*"):
        if not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid():
            yield folder


def make_runtime(state: StateDir) -> Runtime:
    """A scratch folder and the control socket's place, written down before anything is started."""
    scratch = SCRATCH_ROOT / f"{scratch_prefix(state)}{secrets.token_hex(2)}"
    scratch.mkdir(mode=0o700)
    socket = state.root / "control.sock"
    if len(os.fsencode(socket)) > SOCKET_PATH_LIMIT:
        socket = scratch / "control.sock"
    runtime = Runtime(pid=os.getpid(), control_socket=str(socket), scratch=str(scratch))
    write_private(state.runtime, asdict(runtime))
    return runtime


def read_runtime(state: StateDir) -> Runtime | None:
    """None when no supervisor has been here, or it left in good order."""
    if not state.runtime.exists():
        return None
    try:
        return Runtime(**read_private(state.runtime))
    except TypeError:
        raise StateError(f"{state.runtime} is damaged") from None


def clear_runtime(state: StateDir) -> None:
    """Removes what a supervisor leaves in files: its addresses and its scratch folder. Idempotent.

    Nothing is read: a supervisor may have been killed while it wrote.
    """
    tokens = (state.ray_token, state.internal_token)
    for file in (state.local, state.gateway_secrets, *tokens, state.root / "control.sock"):
        file.unlink(missing_ok=True)
    for folder in scratch_folders(state):
        shutil.rmtree(folder, ignore_errors=True)
    for half_written in state.root.glob(".*.json.*"):
        half_written.unlink(missing_ok=True)
    state.runtime.unlink(missing_ok=True)
