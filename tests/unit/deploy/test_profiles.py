from pathlib import Path

import pytest

from deploy.config import PROFILE_DEFAULT
from deploy.model_store import ModelError, no_progress
from deploy.preflight import load_profile, model_dir
from deploy.profiles import SHIPPED, add, find, known
from deploy.yaml_file import ConfigError
from workers.api import Phase


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "My Model"
    made.mkdir()
    (made / "config.json").write_text('{"max_position_embeddings": 2048}')
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"")
    return made


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_profile_is_valid_and_named_like_its_file(file: Path, cache: Path) -> None:
    assert load_profile(file.stem, cache).name == file.stem


def test_the_default_profile_ships_and_the_exact_one_is_float32(cache: Path) -> None:
    exact = load_profile("exact", cache)

    assert PROFILE_DEFAULT in {profile.name for profile in known(cache)}
    assert (exact.prefill.kv_format, exact.decode.kv_format) == ("fp32", "fp32")


def test_an_unknown_profile_is_refused_with_the_known_names(cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"'nope'.*exact, glm-5.2, kimi-k2.6, qwen3-32b, scripted, {PROFILE_DEFAULT}"
    ):
        find("nope", cache)


def test_a_profile_is_found_by_the_path_of_its_file(cache: Path) -> None:
    path = SHIPPED / "exact.yaml"

    assert find(str(path), cache) == path


def test_a_mistake_in_a_profile_names_file_and_key(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text((SHIPPED / "exact.yaml").read_text() + "colour: red\n")

    with pytest.raises(ConfigError, match=r"bad\.yaml[\s\S]*colour"):
        load_profile(str(file), cache)


def test_an_added_folder_can_be_served_under_a_name_made_from_its_own(cache: Path, folder: Path) -> None:
    added = add(folder, None, cache)

    profile = load_profile("my-model", cache)
    assert added.name == profile.name == "my-model"
    assert profile.context_length == 2048
    assert {model_dir(profile, phase, cache, no_progress) for phase in Phase} == {folder}
    assert ("my-model", True) in {(each.name, each.own) for each in known(cache)}


def test_adding_the_same_folder_again_changes_nothing(cache: Path, folder: Path) -> None:
    assert add(folder, "mine", cache) == add(folder, "mine", cache)


@pytest.mark.parametrize("name", ["../escape", "Upper", "with space", "a/b", ".hidden", "x" * 64])
def test_a_name_that_is_no_file_name_is_refused(cache: Path, folder: Path, name: str) -> None:
    with pytest.raises(ModelError, match="give --name"):
        add(folder, name, cache)


def test_an_added_profile_never_takes_the_name_of_another(cache: Path, folder: Path, tmp_path: Path) -> None:
    other = folder.rename(tmp_path / "other")
    folder.mkdir()
    for file in other.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    add(folder, "mine", cache)

    with pytest.raises(ModelError, match="is taken"):
        add(other, "mine", cache)
    with pytest.raises(ModelError, match="taken by a profile that ships"):
        add(other, "exact", cache)


def test_a_profile_that_wants_more_context_than_the_model_has_is_refused(cache: Path, folder: Path) -> None:
    add(folder, "mine", cache)
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')

    with pytest.raises(ModelError, match="2048 is more than the 1024"):
        model_dir(load_profile("mine", cache), Phase.DECODE, cache, no_progress)
