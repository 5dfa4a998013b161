"""What an engine is refused for when its connector is made, and where its tables are checked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kv_transfer.connector import facade
from kv_transfer.connector.compat import TESTED, TESTED_ON_CUDA, UntestedVllm
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.layout import SPLIT_BY_SLOT, UnsupportedCache, isa_of
from tests.support.members import membership_file
from tests.support.real_scheduler import cache_config
from tests.support.toy_engine import connected_config


def untested(tested: Any = TESTED) -> None:
    """In the place of the start-up check: names what it was asked for."""
    raise UntestedVllm("on CUDA" if tested is TESTED_ON_CUDA else "everywhere")


def a_config(folder: Path, **changes: Any) -> ConnectorConfig:
    usual = {
        "engine_id": "e",
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": f"ipc://{folder}/gauges",
        "membership_file": membership_file(folder),
    }
    return ConnectorConfig.parse(usual | changes)


@pytest.mark.timeout(60)  # may be the first that imports vLLM
def test_an_untested_vllm_is_refused_where_pages_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade, "require_tested", untested)
    role, cache = KVConnectorRole.WORKER, cache_config(9)
    facade.PhasegateConnector(connected_config(tmp_path, integrity=False), role, cache).shutdown()

    with pytest.raises(UntestedVllm, match="everywhere"):
        facade.PhasegateConnector(connected_config(tmp_path, integrity=True), role, cache)


def test_a_model_with_two_cache_groups_is_refused(tmp_path: Path) -> None:
    config = connected_config(tmp_path, integrity=True)
    with pytest.raises(UnsupportedCache, match="2 cache groups"):
        facade.PhasegateConnector(config, KVConnectorRole.WORKER, cache_config(9, (None, 64)))


def test_page_faults_on_purpose_are_refused_where_they_cannot_be_made(tmp_path: Path) -> None:
    faults = {"page_faults": str(tmp_path)}
    assert a_config(tmp_path, faults=faults).faults.page_faults == str(tmp_path)
    with pytest.raises(msgspec.ValidationError, match=r"faults\.page_faults"):
        a_config(tmp_path, backend="nccl", faults=faults)


@pytest.mark.parametrize(
    ("changes", "second_runner", "place"),
    [
        ({}, False, "host"),
        ({"integrity": False}, False, None),
        ({"backend": "nccl"}, True, "device"),
        ({"backend": "nccl"}, False, None),
        ({"backend": "nccl", "integrity": False}, True, None),
    ],
)
def test_tables_are_said_to_be_checked_only_where_they_are(
    changes: dict[str, Any], second_runner: bool, place: str | None, tmp_path: Path
) -> None:
    vllm: Any = SimpleNamespace(use_v2_model_runner=second_runner)

    assert facade.tables_checked(a_config(tmp_path, **changes), vllm) == place


def test_on_cuda_more_of_vllm_has_to_be_the_tested_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cache = a_config(tmp_path, backend="nccl"), cache_config(9)
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    vllm: Any = SimpleNamespace(
        use_v2_model_runner=True, parallel_config=parallel, speculative_config=object()
    )
    with pytest.raises(UnsupportedCache, match="speculative decoding"):
        facade._step_check(config, vllm, cache)

    vllm.speculative_config = None
    monkeypatch.setattr(facade, "require_tested", untested)
    with pytest.raises(UntestedVllm, match="on CUDA"):
        facade._step_check(config, vllm, cache)


def a_cuda_layer(backend: str, *, v_size: int = 64) -> SimpleNamespace:
    kind = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(attn_backend=kind, head_size=64, head_size_v=v_size)


@pytest.mark.parametrize(
    ("layers", "isa"),
    [
        ([], "native"),
        ([SimpleNamespace(isa="vec")], "vec"),
        ([a_cuda_layer("FLASH_ATTN"), a_cuda_layer("TRITON_ATTN")], "by_slot"),
        ([a_cuda_layer("FLASH_ATTN"), a_cuda_layer("FLASHINFER")], "native"),
        ([a_cuda_layer("FLASH_ATTN", v_size=32)], "native"),
        ([SimpleNamespace()], "native"),
    ],
    ids=["none", "cpu", "split", "one is not known", "sizes differ", "no backend"],
)
def test_how_pages_lie_inside_is_known_for_backends_that_were_read(
    layers: list[SimpleNamespace], isa: str
) -> None:
    assert isa_of(layers) == isa
    assert set(AttentionBackendEnum.__members__) >= SPLIT_BY_SLOT
