import json
import threading
from pathlib import Path

import pytest

from deploy.model_store import (
    EMBEDDED,
    ModelError,
    Progress,
    embedded_gguf,
    inspect_own,
    no_progress,
    prepare,
    prepared_dir,
    problems,
)


class Conversion:
    """Writes a tiny model, or breaks off in the middle of one."""

    def __init__(self, breaks_with: BaseException | None = None) -> None:
        self.calls = 0
        self._breaks_with = breaks_with

    def __call__(self, gguf: Path, folder: Path, progress: Progress) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        if self._breaks_with is not None:
            raise self._breaks_with
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"weights")
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def made(cache: Path, gguf: Path, conversion: Conversion) -> Path:
    return prepare(EMBEDDED, cache, source=lambda: gguf, convert=conversion)


def test_a_prepared_model_is_complete_and_is_made_once(cache: Path, gguf: Path) -> None:
    conversion = Conversion()

    folder = made(cache, gguf, conversion)

    assert made(cache, gguf, conversion) == folder == prepared_dir(EMBEDDED, cache)
    assert conversion.calls == 1
    assert problems(folder, full=True) == []
    assert set(json.loads((folder / "phasegate.json").read_text())["files"]) == {
        *("config.json", "model.safetensors")
    }


@pytest.mark.parametrize("interruption", [RuntimeError("disk full"), KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupted_conversion_leaves_nothing_half(
    cache: Path, gguf: Path, interruption: BaseException
) -> None:
    with pytest.raises(type(interruption)):
        made(cache, gguf, Conversion(interruption))

    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []
    assert problems(made(cache, gguf, Conversion()), full=True) == []


def test_what_a_killed_conversion_left_is_removed_by_the_next(cache: Path, gguf: Path) -> None:
    stale = cache / "models" / f".{EMBEDDED}.making-abc"
    stale.mkdir(parents=True)

    made(cache, gguf, Conversion())

    assert not stale.exists()


def test_a_conversion_without_weights_is_refused(cache: Path, gguf: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        prepare(EMBEDDED, cache, source=lambda: gguf, convert=lambda *_: None)
    assert not prepared_dir(EMBEDDED, cache).exists()


def test_many_who_want_the_model_at_once_get_one_conversion(cache: Path, gguf: Path) -> None:
    conversion = Conversion()
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(made(cache, gguf, conversion))) for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert folders == [prepared_dir(EMBEDDED, cache)] * 4
    assert conversion.calls == 1


def test_a_model_of_wrong_size_is_made_again(cache: Path, gguf: Path) -> None:
    folder = made(cache, gguf, Conversion())
    (folder / "model.safetensors").write_bytes(b"cut")
    again = Conversion()

    assert problems(folder) == ["model.safetensors has 3 bytes, not 14"]
    made(cache, gguf, again)

    assert again.calls == 1
    assert problems(folder, full=True) == []


def test_changed_bytes_are_found_by_the_full_check(cache: Path, gguf: Path) -> None:
    folder = made(cache, gguf, Conversion())
    (folder / "model.safetensors").write_bytes(b"x" * 14)

    assert problems(folder) == []
    assert problems(folder, full=True) == [
        "model.safetensors has changed: its SHA-256 is not the recorded one"
    ]


@pytest.mark.parametrize("record", ["", "[]", "{}", "not json"])
def test_a_damaged_record_means_no_model(cache: Path, gguf: Path, record: str) -> None:
    folder = made(cache, gguf, Conversion())
    (folder / "phasegate.json").write_text(record)

    assert problems(folder) == [f"{folder} holds no complete model"]


def test_an_unknown_name_is_refused_with_the_known_one(cache: Path) -> None:
    with pytest.raises(ModelError, match=f"'large'.*{EMBEDDED}"):
        prepare("large", cache, progress=no_progress)


def test_the_installed_package_holds_the_file_that_we_know() -> None:
    assert embedded_gguf().suffix == ".gguf"


def own_folder(root: Path, config: str = '{"max_position_embeddings": 2048}') -> Path:
    root.mkdir()
    (root / "config.json").write_text(config)
    (root / "tokenizer.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"")
    return root


def test_an_own_folder_tells_its_context_length(tmp_path: Path) -> None:
    assert inspect_own(own_folder(tmp_path / "mine")).context_length == 2048


def test_every_problem_of_an_own_folder_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        inspect_own(tmp_path)

    for part in ("config.json", "tokenizer.json", "safetensors"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "config", ["{}", "[]", "no", '{"max_position_embeddings": 0}', '{"max_position_embeddings": "many"}']
)
def test_a_config_without_a_context_length_is_refused(tmp_path: Path, config: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_own(own_folder(tmp_path / "mine", config))
