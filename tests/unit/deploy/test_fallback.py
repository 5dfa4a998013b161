"""Where the processor cannot do a profile's caches its fallback runs, and whoever asks is told."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import dry_run, local, preflight
from deploy.cli import main
from deploy.config import PROFILE_DEFAULT, SystemConfig
from deploy.local import StartError, Supervisor
from deploy.preflight import Machine, choose_profile, load_profile, problems
from deploy.profiles import SHIPPED, own_dir
from deploy.state import StateDir, open_state
from deploy.yaml_file import ConfigError
from kv_transfer.api import WireFormat

FALLBACK = "smollm2-135m-bf16"
OLD = frozenset({"avx2"})
NEW = frozenset({"avx2", "avx512f"})
LINE = (
    f"profile {FALLBACK} is used instead of {PROFILE_DEFAULT}: decode.kv_format: a cache in fp8_e4m3 needs a "
    "processor with AVX512F, and this one has none"
)


def with_features(features: frozenset[str]) -> Machine:
    return Machine(
        free_bytes=lambda _: 1 << 40, port_problem=lambda host, port: None, features=lambda: features
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("PHASEGATE_CACHE", str(cache))
    return cache


@pytest.fixture
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> frozenset[str]:
    """What commands find this processor to have: the parameter, or that of an old one."""
    flags: frozenset[str] = getattr(request, "param", OLD)
    found = replace(preflight.inspect_machine(Path("/")), flags=flags)
    monkeypatch.setattr(preflight, "inspect_machine", lambda _: found)
    return flags


def own(folder: Path, name: str, **changes: Any) -> str:
    """The path of a copy of the default profile under another name, with these changes."""
    raw = yaml.safe_load((SHIPPED / f"{PROFILE_DEFAULT}.yaml").read_text()) | {"name": name} | changes
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in raw.items() if value is not None}))
    return str(file)


def test_the_default_decodes_in_fp8_where_the_processor_can(cache: Path) -> None:
    chosen = choose_profile(PROFILE_DEFAULT, cache, with_features(NEW))

    assert (chosen.profile.name, chosen.instead) == (PROFILE_DEFAULT, None)
    assert chosen.profile.prefill.format is WireFormat.BF16
    assert chosen.profile.decode.format is WireFormat.FP8_E4M3
    assert chosen.profile.decode.kv_writes == "nearest"
    assert chosen.profile.decode.kv_scales == "embedded:smollm2-135m"


def test_the_default_is_bf16_where_the_processor_cannot_with_one_line_that_says_why(cache: Path) -> None:
    chosen = choose_profile(PROFILE_DEFAULT, cache, with_features(OLD))

    assert (chosen.profile.name, chosen.instead) == (FALLBACK, LINE)
    assert chosen.profile.prefill.format is chosen.profile.decode.format is WireFormat.BF16


def test_the_default_and_its_fallback_differ_in_decodes_cache_alone(cache: Path) -> None:
    asked, fallback = load_profile(PROFILE_DEFAULT, cache), load_profile(FALLBACK, cache)
    decode = replace(asked.decode, kv_format="bf16", kv_scales=None)

    assert replace(asked, name=FALLBACK, fallback=None, decode=decode) == fallback


@pytest.mark.parametrize("machine_features", [OLD, NEW])
def test_neither_kind_of_processor_stands_in_the_way_of_the_default(
    machine_features: frozenset[str], cache: Path, tmp_path: Path
) -> None:
    machine = replace(with_features(machine_features), haproxy_problem=lambda: None)

    assert problems(SystemConfig(), StateDir(tmp_path / "s"), cache, machine=machine) == []


def test_an_own_profile_without_a_fallback_is_refused_with_what_would_work(
    cache: Path, tmp_path: Path
) -> None:
    config = SystemConfig(profile=own(tmp_path, "mine", fallback=None))
    machine = replace(with_features(OLD), haproxy_problem=lambda: None)

    (refused,) = problems(config, StateDir(tmp_path / "s"), cache, machine=machine)

    assert choose_profile(config.profile, cache, machine).instead is None
    assert refused.key == "profile"
    assert "the nearest that works here is kv_format bf16" in refused.text


def test_an_own_profile_may_fall_back_to_a_registered_one(cache: Path, tmp_path: Path) -> None:
    own(own_dir(cache), "mine-bf16", fallback=None, decode={})
    profile = own(tmp_path, "mine", fallback="mine-bf16")

    assert choose_profile(profile, cache, with_features(OLD)).profile.name == "mine-bf16"
    assert choose_profile(profile, cache, with_features(NEW)).profile.name == "mine"


@pytest.mark.parametrize("machine_features", [OLD, NEW])
@pytest.mark.parametrize(
    ("fallback", "said"),
    [
        ("nobody", "'nobody'; there are exact, .*smollm2-135m"),
        ("mine-bf16.yaml", "no profile is called 'mine-bf16.yaml'"),
        (PROFILE_DEFAULT, f"{PROFILE_DEFAULT} has a fallback itself"),
        ("qwen3-32b", "qwen3-32b answers to other names than mine"),
    ],
)
def test_a_wrong_fallback_is_told_on_every_processor(
    fallback: str, said: str, machine_features: frozenset[str], cache: Path, tmp_path: Path
) -> None:
    profile = own(tmp_path, "mine", fallback=fallback)

    with pytest.raises(ConfigError, match=f"^profile: mine: fallback: .*{said}"):
        choose_profile(profile, cache, with_features(machine_features))


def test_what_is_wrong_with_the_fallback_that_runs_is_told_under_its_name(
    cache: Path, tmp_path: Path
) -> None:
    own(own_dir(cache), "still-fp8", fallback=None)
    own(own_dir(cache), "made-up", fallback=None, engine="scripted", decode={})
    for fallback, said in (("still-fp8", "AVX512F"), ("made-up", "answers from a script")):
        config = SystemConfig(mode="production", profile=own(tmp_path, "mine", fallback=fallback))
        machine = replace(with_features(OLD), haproxy_problem=lambda: None)

        (refused,) = problems(config, StateDir(tmp_path / "s"), cache, machine=machine)

        assert refused.text.startswith(fallback)
        assert said in refused.text


@pytest.mark.parametrize(("features", "times"), [(OLD, 1), (NEW, 0)], indirect=["features"])
@pytest.mark.parametrize(
    ("command", "prefix"),
    [
        (["config", "check"], "phasegate: "),
        (["preflight"], "phasegate: "),
        (["config", "show"], "# "),
    ],
)
def test_commands_that_look_ahead_say_which_profile_would_run(
    command: list[str],
    prefix: str,
    features: frozenset[str],
    times: int,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("{port: 18617, internal_port: 0, ingress: proxy}")
    state = [] if command[-1] == "show" else ["--state", str(tmp_path / "state")]

    assert main([*command, "--config", str(file), *state]) == 0

    assert capsys.readouterr().out.splitlines().count(f"{prefix}{LINE}") == times


@pytest.mark.parametrize(("features", "notes"), [(OLD, 1), (NEW, 0)], indirect=["features"])
def test_a_dry_run_is_of_the_profile_asked_for_and_notes_what_a_start_would_use(
    features: frozenset[str],
    notes: int,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dry_run, "report", lambda profile: [f"report of {profile.name}"])

    assert main(["preflight", "--dry-run"]) == 0

    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"phasegate: report of {PROFILE_DEFAULT}"
    assert said[1:] == [f"phasegate: note: in a start here {LINE}"] * notes


@pytest.mark.usefixtures("features")
def test_an_unknown_profile_is_shown_all_the_same(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--profile", "nobody"]) == 0
    assert "profile: nobody" in capsys.readouterr().out


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """A supervisor takes signals over, and the process's umask."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    mask = os.umask(0o077)
    yield
    os.umask(mask)
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("features", "runs", "lines"),
    [(OLD, FALLBACK, [LINE]), (NEW, PROFILE_DEFAULT, [])],
    indirect=["features"],
)
def test_a_start_says_once_which_profile_is_used_instead(
    features: frozenset[str],
    runs: str,
    lines: list[str],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    def stop_here(*_: object) -> None:
        raise StartError("far enough")

    monkeypatch.setattr(local.preflight, "model_dir", lambda *_: tmp_path)
    monkeypatch.setattr(Supervisor, "_start_redis", stop_here)
    config = SystemConfig(port=18617, internal_port=0, ingress="proxy")
    supervisor = Supervisor(open_state(tmp_path / "s"), config, cache, say=said.append)

    with pytest.raises(StartError, match="far enough"):
        supervisor.run(lambda _: None)

    assert [line for line in said if "instead" in line] == lines
    assert [line for line in said if line.startswith("model: ")] == [f"model: {runs}"]
