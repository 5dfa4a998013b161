"""Contracts as they are read off model folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.api import Contract
from tests.support.model_folders import (
    CONFIG,
    DIFFERENCES,
    TEMPLATE,
    TOKENIZER,
    Difference,
    contracts,
    edit,
    profile,
    write_model,
)
from workers.profile.fingerprint import contract_of
from workers.profile.model_folder import ModelFolderError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m")


def read(folder: Path, **changed: Any) -> Contract:
    return contract_of(profile(**changed), folder)


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_what_keeps_engines_apart_is_named_and_nothing_else_is(tmp_path: Path, kind: str) -> None:
    difference: Difference = DIFFERENCES[kind]

    one, other = contracts(tmp_path, difference)

    told = one.difference(other)
    assert told.startswith(difference.named)
    assert told.count("; ") == 0
    assert one.short != other.short


def quantised(folder: Path) -> None:
    edit(folder, "config.json", dtype=None, torch_dtype="float16", quantization_config={"bits": 4})


def other_version_of_transformers(folder: Path) -> None:
    """What it writes was read from real folders: names, defaults and layout of both forms."""
    edit(
        folder,
        "config.json",
        rope_parameters=None,
        rope_theta=10000,
        rope_scaling={"type": "default"},
        head_dim=16,
        transformers_version="4.40.0",
        rms_norm_eps=9.999999747378752e-06,
        use_cache=True,
        _name_or_path="elsewhere",
    )
    edit(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    model = TOKENIZER["model"] | {"merges": ["a b"]}
    content = TOKENIZER | {"model": model, "version": "2.0", "truncation": {"max_length": 8}}
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=4, sort_keys=True))


def template_elsewhere(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder, "tokenizer_config.json", chat_template=TEMPLATE)


def template_in_a_file_of_its_own(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def text_part_of_a_larger_model(folder: Path) -> None:
    outer = {"architectures": CONFIG["architectures"], "text_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(outer))


def unused_window(folder: Path) -> None:
    edit(folder, "config.json", sliding_window=4096, use_sliding_window=False)


@pytest.mark.parametrize(
    "change",
    [
        quantised,
        other_version_of_transformers,
        template_elsewhere,
        template_in_a_file_of_its_own,
        text_part_of_a_larger_model,
        unused_window,
    ],
    ids=lambda change: change.__name__,
)
def test_a_copy_in_another_format_or_spelling_keeps_the_contract(folder: Path, change: Any) -> None:
    before = read(folder)
    change(folder)

    assert before.difference(read(folder)) == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: edit(f, "tokenizer_config.json", add_bos_token=True), "tokenizer: add bos token"),
        (
            lambda f: edit(f, "tokenizer_config.json", eos_token={"content": "</s>"}),
            "eos token <end> against </s>",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer: tokens 3 against none, sha256"),
        (lambda f: (f / "chat_template.jinja").unlink(), "chat template: characters 65 against none"),
        (lambda f: edit(f, "config.json", sliding_window=64), "kv geometry: window none against 64"),
        (lambda f: edit(f, "config.json", kv_lora_rank=512), "kv geometry: kv lora rank none against 512"),
        (
            lambda f: edit(
                f, "config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_parameters=None
            ),
            "rope: type default against yarn, theta 10000 against none, factor none against 4",
        ),
        (
            lambda f: edit(f, "config.json", rope_parameters={"full_attention": {"rope_theta": 7.5}}),
            "full attention.theta none against 7.5",
        ),
        (
            lambda f: edit(
                f,
                "config.json",
                rope_parameters={"rope_theta": 10000.0, "rope_type": "longrope", "long_factor": [1.5] * 48},
            ),
            "rope: type default against longrope, long factor none against ",
        ),
    ],
)
def test_other_ways_to_differ_are_told_as_well(folder: Path, change: Any, named: str) -> None:
    before = read(folder)
    change(folder)

    told = before.difference(read(folder))

    assert named in told
    assert len(told) < 300


def test_tokenizers_of_other_kinds_are_told_by_their_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_bytes(b"{}")
    (folder / "merges.txt").write_bytes(b"a b")
    before = read(folder)
    (folder / "merges.txt").write_bytes(b"b a")

    assert before.difference(read(folder)).startswith("tokenizer: merges.txt ")


def test_what_the_folder_records_of_its_source_goes_before_what_the_profile_says(folder: Path) -> None:
    recorded = read(folder, source_revision="said")
    edit(folder, "phasegate.json", source_revision="made from this")
    named = read(folder, source_revision="said")
    (folder / "phasegate.json").unlink()
    said, unsaid = read(folder, source_revision="said"), read(folder)

    assert [contract.source for contract in (recorded, named, said, unsaid)] == [
        {"revision": "ab" * 32},
        {"revision": "made from this"},
        {"revision": "said"},
        {},
    ]


def test_several_templates_are_one_fact(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    edit(folder, "tokenizer_config.json", chat_template=several)
    before = read(folder)
    edit(folder, "tokenizer_config.json", chat_template=several[:1])

    assert before.difference(read(folder)).startswith("chat template: characters ")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "phasegate.json"])
def test_a_file_that_cannot_be_understood_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("[1, 2")

    with pytest.raises(ModelFolderError, match=name.replace(".", r"\.")):
        read(folder)


def test_a_folder_without_a_configuration_has_no_contract(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        read(tmp_path)
