import pytest

from tests.support.transfer_world import World


@pytest.fixture
def world() -> World:
    return World()
