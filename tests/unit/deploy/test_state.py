import fcntl
import os
import stat
from pathlib import Path

import pytest

from deploy.state import (
    StateDir,
    StateError,
    StateLock,
    clear_runtime,
    held,
    load_or_create_secrets,
    make_runtime,
    open_state,
    read_private,
    read_runtime,
    scratch_folders,
    write_private,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return open_state(tmp_path / "state")


def test_a_folder_that_others_can_read_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    state = open_state(tmp_path)

    assert mode(state.root) == 0o700
    assert mode(state.logs) == 0o700


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")

    with pytest.raises(StateError, match=r"state folder .*state: File exists"):
        open_state(tmp_path / "state")


def test_a_link_to_a_folder_has_the_folder_s_marker_and_another_folder_has_not(tmp_path: Path) -> None:
    state = open_state(tmp_path / "real")
    (tmp_path / "link").symlink_to(state.root)

    assert open_state(tmp_path / "link").marker == state.marker
    assert open_state(tmp_path / "other").marker != state.marker


def test_secrets_are_private_and_stay_the_same(state: StateDir) -> None:
    first = load_or_create_secrets(state)

    assert load_or_create_secrets(state) == first
    assert mode(state.secrets) == 0o600
    assert len(bytes.fromhex(first.pepper)) == 32


def test_secrets_of_two_folders_have_nothing_in_common(state: StateDir, tmp_path: Path) -> None:
    ours, theirs = load_or_create_secrets(state), load_or_create_secrets(open_state(tmp_path / "other"))

    assert len({ours.pepper, ours.redis_password, theirs.pepper, theirs.redis_password}) == 4


def test_secrets_are_not_shown(state: StateDir) -> None:
    secrets = load_or_create_secrets(state)

    assert secrets.pepper not in repr(secrets)
    assert secrets.redis_password not in repr(secrets)


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"pepper": "00"}', '{"redis_password": "a", "x": "b"}'])
def test_damaged_secrets_are_refused_and_never_replaced(state: StateDir, damage: str) -> None:
    state.secrets.touch(mode=0o600)
    state.secrets.write_text(damage)

    with pytest.raises(StateError, match="damaged"):
        load_or_create_secrets(state)
    assert state.secrets.read_text() == damage


def test_secrets_that_others_can_read_are_refused(state: StateDir) -> None:
    load_or_create_secrets(state)
    state.secrets.chmod(0o640)

    with pytest.raises(StateError, match=r"readable by others .*chmod 600"):
        load_or_create_secrets(state)


def test_a_private_file_is_replaced_whole(state: StateDir) -> None:
    write_private(state.local, {"a": "long" * 100})
    state.local.chmod(0o644)

    write_private(state.local, {"b": 1})

    assert read_private(state.local) == {"b": 1}
    assert mode(state.local) == 0o600
    assert [path.name for path in state.root.iterdir() if path.name.startswith(".")] == []


def test_the_second_supervisor_is_refused_with_the_pid_of_the_first(state: StateDir) -> None:
    first, second = StateLock(state), StateLock(state)
    first.acquire()

    with pytest.raises(StateError, match=rf"already running .*pid {os.getpid()}"):
        second.acquire()
    assert held(state)

    first.release()
    assert not held(state)
    second.acquire()
    second.release()
    second.release()


def test_somebody_who_only_looks_is_not_taken_for_a_supervisor(state: StateDir) -> None:
    """`phasegate status` at the very moment of a start must not make it fail."""
    looking = state.lock.open("a+")
    fcntl.flock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock = StateLock(state, sleep=lambda _: looking.close())

    lock.acquire()

    assert held(state)
    lock.release()


def test_nobody_holds_a_folder_in_which_nothing_ever_ran(state: StateDir) -> None:
    assert not held(state)
    assert read_runtime(state) is None


def test_a_supervisor_leaves_no_file_that_says_it_runs(state: StateDir) -> None:
    runtime = make_runtime(state)
    for file in (state.local, state.gateway_secrets, state.ray_token, Path(runtime.control_socket)):
        file.touch()
    load_or_create_secrets(state)

    clear_runtime(state)
    clear_runtime(state)

    assert sorted(path.name for path in state.root.iterdir()) == ["logs", "secrets.json"]
    assert not Path(runtime.scratch).exists()


def test_a_long_state_folder_has_its_socket_where_the_path_is_short(tmp_path: Path) -> None:
    state = open_state(tmp_path / ("long" * 30))

    runtime = make_runtime(state)

    assert Path(runtime.control_socket).parent == Path(runtime.scratch)
    assert mode(Path(runtime.scratch)) == 0o700
    assert read_runtime(state) == runtime
    clear_runtime(state)


def test_what_a_killed_supervisor_left_is_found_without_any_file_that_says_so(
    state: StateDir, tmp_path: Path
) -> None:
    """It may be killed between making a folder and writing its name down, or while it writes."""
    left, other = make_runtime(state), make_runtime(open_state(tmp_path / "other"))
    for damage in ("", "{", '{"pid": 1}', None):
        Path(left.scratch).mkdir(exist_ok=True, mode=0o700)
        (state.root / ".local.json.half").write_text("{")
        if damage is None:
            state.runtime.unlink(missing_ok=True)
        else:
            state.runtime.touch(mode=0o600)
            state.runtime.write_text(damage)

        clear_runtime(state)

        assert list(scratch_folders(state)) == []
        assert sorted(path.name for path in state.root.iterdir()) == ["logs"]
    assert Path(other.scratch).is_dir()
    clear_runtime(open_state(tmp_path / "other"))


def test_a_private_file_that_cannot_be_written_leaves_the_old_one_and_no_half(state: StateDir) -> None:
    write_private(state.local, {"a": 1})

    with pytest.raises(TypeError):
        write_private(state.local, {"a": object()})

    assert read_private(state.local) == {"a": 1}
    assert [path.name for path in state.root.iterdir() if path.name.startswith(".")] == []


def test_only_a_folder_that_we_made_is_removed_as_scratch(state: StateDir, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    write_private(
        state.runtime,
        {"pid": 1, "control_socket": str(state.root / "control.sock"), "scratch": str(precious)},
    )

    clear_runtime(state)

    assert precious.is_dir()
