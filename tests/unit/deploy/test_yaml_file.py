from pathlib import Path

import pytest

from deploy.yaml_file import ConfigError, read_document, read_yaml


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "system.yaml"
    file.write_text(text)
    return file


def test_a_key_given_twice_is_refused_with_its_path_and_both_lines(tmp_path: Path) -> None:
    file = written(
        tmp_path, "port: 1\nlimits:\n  max_in_flight: 1\n  max_body_bytes: 2\n  max_in_flight: 3\n"
    )

    with pytest.raises(ConfigError, match=r"limits\.max_in_flight: given twice, in lines 3 and 5"):
        read_yaml(file)


def test_all_keys_given_twice_are_told_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1\nport: 2\nlist:\n- {a: 1, a: 2}\nport: 3\n")

    assert [str(mistake) for mistake in read_document(file).mistakes] == [
        "port: given twice, in lines 1 and 2",
        "port: given twice, in lines 1 and 5",
        "list.0.a: given twice, in lines 4 and 4",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2020-01-01: x", "configuration: line 1: a key must be text"),
        ("limits: {1: x}", "limits: line 1: a key must be text"),
        ("limits: &a {max_in_flight: *a}", "limits.max_in_flight: line 1: an alias inside itself"),
        ("? [a, b]\n: c", "configuration: line 1: a key must be text"),
    ],
    ids=["date as key", "number as key", "alias inside itself", "list as key"],
)
def test_what_yaml_allows_and_a_configuration_cannot_hold_is_placed(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in [str(mistake) for mistake in read_document(written(tmp_path, text)).mistakes]


def test_the_same_key_in_two_sections_and_a_merged_one_are_fine(tmp_path: Path) -> None:
    file = written(tmp_path, "base: &b {port: 1}\na: {<<: *b, port: 2}\nb: {port: 3}\n")

    assert read_yaml(file) == {"base": {"port": 1}, "a": {"port": 2}, "b": {"port": 3}}


def test_aliases_that_multiply_are_looked_at_once_each(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]

    assert read_document(written(tmp_path, "\n".join(lines))).mistakes == ()


def test_lines_of_keys_are_told(tmp_path: Path) -> None:
    document = read_document(written(tmp_path, "# first\nport: 1\nlimits:\n  max_in_flight: 2\n"))

    assert document.lines == {"port": 2, "limits": 3, "limits.max_in_flight": 4}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        read_yaml(tmp_path / "absent.yaml")


def test_a_file_that_is_not_yaml_is_told_in_one_line_without_its_text(tmp_path: Path) -> None:
    """PyYAML quotes the line at fault, and a password may stand in it."""
    file = written(tmp_path, "port: 8600\nredis: {state_url: 'redis://:hunter2@x' }}")

    with pytest.raises(ConfigError, match=r"not YAML: .*line 2") as refused:
        read_yaml(file)
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
