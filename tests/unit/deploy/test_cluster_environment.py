import stat
from pathlib import Path

from deploy.cluster_environment import driver_environment, make_token


def test_each_start_has_a_fresh_private_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    make_token(token)
    first = token.read_text()

    make_token(token)

    assert token.read_text() != first
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_the_cluster_demands_the_token_whose_value_is_in_no_variable(tmp_path: Path) -> None:
    token = tmp_path / "token"
    make_token(token)

    environment = driver_environment(token)

    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(token)
    assert token.read_text() not in environment.values()
