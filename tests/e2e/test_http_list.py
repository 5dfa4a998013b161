"""The list of checks on the whole system as users start it: HAProxy in front, real engines behind."""

from collections.abc import Callable

import pytest

from tests.support.stack import Stack, busy
from tests.support.surface import Surface, nothing_is_held
from tests.support.surface_checks import CHECKS, a_client_that_does_not_read_is_ended_alone

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

AFFORDABLE = [check for check in CHECKS if check is not a_client_that_does_not_read_is_ended_alone]
"""Real engines take minutes to fill all buffers: the long form does it with scripted ones."""


@pytest.mark.parametrize("check", AFFORDABLE, ids=lambda check: check.__name__)
def test_surface(stack: Stack, check: Callable[[Surface], None]) -> None:
    surface = surface_of(stack)

    check(surface)

    nothing_is_held(surface)


def surface_of(stack: Stack) -> Surface:
    return Surface(
        stack.base_url,
        stack.account_id,
        stack.api_key,
        stack.model,
        held=lambda: busy(stack.control("/status").json()),
    )
