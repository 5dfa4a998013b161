"""A phase's scale file is judged before an engine is started with it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kv_transfer.api import (
    LayerScales,
    ScaleFile,
    ScaleFileError,
    WireFormat,
    encode_scale_file,
    read_scale_file,
)
from kv_transfer.api import scale_file_sha256 as sha256_of
from tests.support.model_folders import write_model
from workers.api import Phase
from workers.profile.fingerprint import contract_of
from workers.profile.scales import checked_scale_file, scale_file_sha256
from workers.profile.schema import ModelProfile, ProfileError, parse_profile

ROOT = Path(__file__).parents[4]


def a_profile(scales: Path | str | None, **more: Any) -> ModelProfile:
    decode = {"kv_format": "fp8_e4m3", "kv_scales": None if scales is None else str(scales)}
    raw = {
        "name": "own",
        "model_id": "own",
        "weights": {"path": "/models/own"},
        "context_length": 4096,
        "decode": decode,
    }
    return parse_profile(raw | more, source="test")


def a_file(
    folder: Path, *, format: WireFormat = WireFormat.FP8_E4M3, source_revision: str | None = "one"
) -> Path:
    path = folder / "scales.json"
    layers = (LayerScales(name="a", k=0.5, v=2.0),)
    file = ScaleFile(version=1, format=format, source_revision=source_revision, layers=layers)
    path.write_bytes(encode_scale_file(file))
    return path


@pytest.mark.parametrize("theirs", ["one", None])
@pytest.mark.parametrize("ours", ["one", None])
def test_a_fitting_file_is_found_and_named_by_its_bytes(
    tmp_path: Path, ours: str | None, theirs: str | None
) -> None:
    path = a_file(tmp_path, source_revision=theirs)
    profile = a_profile(path, source_revision=ours)

    assert checked_scale_file(profile, Phase.DECODE) == path
    assert scale_file_sha256(profile, Phase.DECODE) == sha256_of(path)
    assert checked_scale_file(profile, Phase.PREFILL) is None
    assert scale_file_sha256(profile, Phase.PREFILL) == ""


def test_scales_that_come_with_us_are_found_by_name_and_are_those_of_their_model() -> None:
    shipped = yaml.safe_load((ROOT / "deploy/models/smollm2-135m.yaml").read_text())
    profile = parse_profile(shipped, source="test")

    path = checked_scale_file(profile, Phase.DECODE)

    assert path is not None
    assert len(read_scale_file(path).layers) == shipped["geometry"]["num_hidden_layers"]
    with pytest.raises(ScaleFileError, match=r"^decode.kv_scales: .*none.json: No such file"):
        checked_scale_file(a_profile("embedded:none"), Phase.DECODE)


def test_engines_whose_decode_has_other_scales_have_other_contracts(tmp_path: Path) -> None:
    folder, path = write_model(tmp_path / "model"), a_file(tmp_path)
    without, with_file = (contract_of(a_profile(scales), folder) for scales in (None, path))

    assert with_file.scale_file == {"sha256": sha256_of(path)}
    assert without.difference(with_file).startswith("scale file: sha256 none against ")


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"format": WireFormat.FP8_E5M2}, "for a cache in fp8_e5m2, not in fp8_e4m3"),
        ({"source_revision": "two"}, "source_revision 'two', the profile has 'one'"),
    ],
)
def test_a_file_of_another_cache_or_model_is_refused_by_the_profiles_key(
    tmp_path: Path, written: dict[str, Any], why: str
) -> None:
    profile = a_profile(a_file(tmp_path, **written), source_revision="one")

    with pytest.raises(ScaleFileError, match=why) as refused:
        checked_scale_file(profile, Phase.DECODE)
    assert str(refused.value).startswith("decode.kv_scales: ")


def test_a_missing_file_is_refused_by_the_profiles_key(tmp_path: Path) -> None:
    with pytest.raises(ScaleFileError, match=r"^decode.kv_scales: .*none.json: No such file"):
        checked_scale_file(a_profile(tmp_path / "none.json"), Phase.DECODE)


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        ({"kv_scales": "/scales.json"}, "decode: kv_scales: a cache in bf16 has no scales"),
        ({"kv_format": "fp8_e4m3", "kv_scales": "scales.json"}, "decode.kv_scales: "),
        ({"kv_format": "fp8_e4m3", "kv_scales": "embedded:../scales"}, "decode.kv_scales: "),
        ({"kv_format": "fp8_e4m3", "kv_writes": "truncate"}, "decode.kv_writes: "),
    ],
)
def test_what_a_profile_cannot_mean_is_told_with_its_key(decode: dict[str, Any], why: str) -> None:
    with pytest.raises(ProfileError, match=why):
        a_profile(None, decode=decode)
