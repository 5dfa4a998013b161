import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config import SystemConfig, TestingConfig, parse
from deploy.preflight import FOLDER_NEEDS_BYTES, MIB, Machine, problems
from deploy.state import StateDir, load_or_create_secrets, open_state

PLENTY = Machine(
    free_bytes=lambda _: 1 << 40,
    port_problem=lambda host, port: None,
    features=lambda: frozenset({"avx2", "avx512f"}),
)


def short_of(folder: str, free: int) -> Machine:
    return replace(PLENTY, free_bytes=lambda path: free if str(path) == folder else 1 << 40)


def told(config: SystemConfig, root: Path, cache: Path, **options: Any) -> dict[str, str]:
    found = problems(config, StateDir(root), cache, **{"machine": PLENTY, **options})
    return {mistake.key: mistake.text for mistake in found}


def own_profile(tmp_path: Path, **changes: Any) -> str:
    """The path of a profile whose model folder can be served."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 512, "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    file = tmp_path / "own.yaml"
    profile = {"name": "own", "model_id": "own", "weights": {"path": str(folder)}, "context_length": 512}
    file.write_text(yaml.safe_dump(profile | changes))
    return str(file)


@pytest.fixture
def own(tmp_path: Path) -> SystemConfig:
    return SystemConfig(profile=own_profile(tmp_path))


def test_a_machine_that_can_start_has_no_problem_and_nothing_is_made(
    own: SystemConfig, tmp_path: Path
) -> None:
    assert told(own, tmp_path / "state", tmp_path / "cache") == {}
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "cache").exists()


def test_a_scale_file_that_is_not_for_the_cache_stands_in_the_way(tmp_path: Path) -> None:
    decode = {"kv_format": "fp8_e4m3", "kv_scales": str(tmp_path / "none.json")}
    config = SystemConfig(profile=own_profile(tmp_path, decode=decode))

    found = told(config, tmp_path / "state", tmp_path / "cache")

    assert "decode.kv_scales: " in found["profile"]
    assert "none.json: No such file" in found["profile"]


def test_the_gateways_cost_is_not_measured_with_two_decode_pools(tmp_path: Path) -> None:
    for profile, dense in ((own_profile(tmp_path), False), ("smollm2-135m-pools", True)):
        config = SystemConfig(profile=profile, testing=TestingConfig(handle_arm=True))

        assert ("testing.handle_arm" in told(config, tmp_path / "state", tmp_path / "cache")) is dense


@pytest.mark.parametrize("features", [frozenset(), frozenset({"avx512f"})])
def test_a_format_that_the_processor_cannot_do_stands_in_the_way(
    features: frozenset[str], tmp_path: Path
) -> None:
    config = SystemConfig(profile=own_profile(tmp_path, decode={"kv_format": "fp8_e4m3"}))
    machine = replace(PLENTY, features=lambda: features)

    found = told(config, tmp_path / "state", tmp_path / "cache", machine=machine)

    assert ("needs a processor with AVX512F" in found.get("profile", "")) is (not features)


def test_without_haproxy_the_plain_proxy_is_offered_and_is_enough(own: SystemConfig, tmp_path: Path) -> None:
    bare = replace(PLENTY, haproxy_problem=lambda: "no such program")
    plain = replace(own, ingress="proxy")

    assert "choose `ingress: proxy`" in told(own, tmp_path / "state", tmp_path, machine=bare)["ingress"]
    assert told(plain, tmp_path / "state", tmp_path, machine=bare) == {}


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    nothing = replace(
        PLENTY, free_bytes=lambda _: 0, port_problem=lambda host, port: "Address already in use"
    )

    found = told(SystemConfig(profile="absent"), tmp_path / "state", tmp_path, machine=nothing)

    assert set(found) == {"profile", "port", "internal_port", "state folder", "shared memory"}


def test_too_little_shared_memory_is_told_with_what_is_missing_and_what_to_do(
    own: SystemConfig, tmp_path: Path
) -> None:
    found = told(own, tmp_path / "s", tmp_path, machine=short_of("/dev/shm", 64 * MIB))

    assert found.keys() == {"shared memory"}
    assert "has 64 MiB free, 100 MiB are needed (36 MiB are missing)" in found["shared memory"]
    assert "--shm-size" in found["shared memory"]


@pytest.mark.parametrize("what", ["state folder", "scratch folder"])
def test_a_full_disk_is_told(own: SystemConfig, tmp_path: Path, what: str) -> None:
    folder = {"state folder": str(tmp_path / "s"), "scratch folder": "/tmp"}[what]

    found = told(own, tmp_path / "s", tmp_path, machine=short_of(folder, FOLDER_NEEDS_BYTES - 1))

    assert found.keys() == {what}
    assert "make room" in found[what]


def test_a_model_that_is_not_made_yet_needs_room_in_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    assert told(SystemConfig(), tmp_path / "s", cache) == {}
    found = told(SystemConfig(), tmp_path / "s", cache, machine=short_of(str(cache), 100 * MIB))
    assert "PHASEGATE_CACHE" in found["model cache"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context_length": 1024}, "1024 is more than the 512"),
        ({"weights": {"path": "/absent"}}, "/absent is not a folder"),
        ({"block_size": 7}, "block_size"),
        ({"engine": "none"}, "engine"),
        ({"decode": {"weight_format": "int4"}}, "decode.weight_format: int4, and the model in"),
        ({"prefill": {"weight_format": "fp32"}}, "holds bf16; the nearest that works is native"),
        ({"tool_parser": "hermes"}, "tool_parser: answers are not parsed yet"),
    ],
)
def test_what_is_wrong_with_a_profile_or_its_folder_is_told(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    found = told(SystemConfig(profile=own_profile(tmp_path, **change)), tmp_path / "s", tmp_path)

    assert found.keys() == {"profile"}
    assert said in found["profile"]


def test_each_phase_has_weights_of_its_own_that_hold_what_it_says(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    own_profile(tmp_path)
    shutil.copytree(tmp_path / "model", narrow)
    config = json.loads((narrow / "config.json").read_text())
    quantised = {"quant_method": "awq", "bits": 4}
    (narrow / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    decode = {"weights": {"path": str(narrow)}, "weight_format": "int4"}
    for format_, wrong in (("bf16", {}), ("int4", {"profile"})):
        profile = own_profile(tmp_path, prefill={"weight_format": format_}, decode=decode)
        assert told(SystemConfig(profile=profile), tmp_path / "s", tmp_path).keys() == set(wrong)
    shutil.rmtree(narrow)

    found = told(SystemConfig(profile=own_profile(tmp_path, decode=decode)), tmp_path / "s", tmp_path)

    assert f"{narrow} is not a folder" in found["profile"]


@pytest.mark.parametrize(
    ("name", "content", "apart"),
    [
        ("phasegate.json", {"source_revision": "another"}, "source: revision the parent against another"),
        (
            "config.json",
            {"max_position_embeddings": 512, "dtype": "bfloat16", "rope_theta": 7},
            "rope: theta none against 7",
        ),
    ],
)
def test_phases_whose_folders_hold_different_models_are_refused_before_the_start(
    tmp_path: Path, name: str, content: dict[str, Any], apart: str
) -> None:
    other = tmp_path / "other"
    profile = own_profile(tmp_path, source_revision="the parent", decode={"weights": {"path": str(other)}})
    shutil.copytree(tmp_path / "model", other)
    assert told(SystemConfig(profile=profile), tmp_path / "s", tmp_path) == {}
    (other / name).write_text(json.dumps(content))

    found = told(SystemConfig(profile=profile), tmp_path / "s", tmp_path)

    assert found["profile"].endswith(
        f"weights: prefill and decode differ in {apart}: both phases must serve one model"
    )


def test_production_refuses_a_scripted_engine_and_weak_secrets_of_the_folder(tmp_path: Path) -> None:
    config = parse({"mode": "production", "profile": own_profile(tmp_path, engine="scripted")}, source="x")
    state = open_state(tmp_path / "s")
    load_or_create_secrets(state)
    state.secrets.write_text('{"redis_password": "password", "pepper": "0000000000000000000000000000"}')

    found = told(config, state.root, tmp_path)

    assert "engine: vllm" in found["profile"] or "engine" in found["profile"]
    assert {key.rpartition(": ")[2] for key in found} == {"profile", "redis_password", "pepper"}


@pytest.mark.parametrize(("text", "mode"), [("{", 0o600), ('{"pepper": "x"}', 0o600), ("{}", 0o644)])
def test_secrets_that_are_damaged_or_open_are_told(
    own: SystemConfig, tmp_path: Path, text: str, mode: int
) -> None:
    state = open_state(tmp_path / "s")
    state.secrets.write_text(text)
    state.secrets.chmod(mode)

    assert str(state.secrets) in told(own, state.root, tmp_path)["state folder"]


def test_a_taken_port_is_told_with_who_holds_it(own: SystemConfig, tmp_path: Path) -> None:
    from deploy.preflight import THIS_MACHINE

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = THIS_MACHINE.port_problem("127.0.0.1", port)

    assert problem is not None
    assert f"pid {os.getpid()}" in problem
    assert THIS_MACHINE.port_problem("127.0.0.1", port) is None
    assert THIS_MACHINE.port_problem("no.such.host.invalid", port) == "no such address"


def test_ports_of_the_running_system_itself_and_of_doubtful_keys_are_not_looked_at(
    own: SystemConfig, tmp_path: Path
) -> None:
    taken = replace(PLENTY, port_problem=lambda host, port: "taken")

    assert told(own, tmp_path / "s", tmp_path, machine=taken).keys() == {"port", "internal_port"}
    assert told(own, tmp_path / "s", tmp_path, machine=taken, running=True) == {}
    assert told(own, tmp_path / "s", tmp_path, machine=taken, doubtful=frozenset({"port"})) == {}


def test_the_dashboards_port_is_looked_at_when_there_is_one(tmp_path: Path) -> None:
    taken = replace(PLENTY, port_problem=lambda host, port: "taken" if port == 8265 else None)
    raw = {"profile": own_profile(tmp_path), "dashboard": {"host": "127.0.0.1"}}

    assert told(parse(raw, source="x"), tmp_path / "s", tmp_path, machine=taken).keys() == {"dashboard.port"}
