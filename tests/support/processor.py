"""Why engines of a profile would not start on the processor that the tests run on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.bootstrap import inspect_machine
from workers.profile.hardware import shortcomings
from workers.profile.schema import parse_profile


def lack(profile: Mapping[str, Any]) -> str:
    """The first reason; empty where there is none."""
    features = inspect_machine(Path("/")).flags
    return next(shortcomings(parse_profile(profile, source="test"), "cpu", features), "")
