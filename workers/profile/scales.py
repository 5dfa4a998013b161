"""The scale file that a phase's cache uses, as far as it can be judged without an engine."""

from pathlib import Path
from typing import Final

from kv_transfer.api import ScaleFileError, read_scale_file
from kv_transfer.api import scale_file_sha256 as sha256_of
from workers.api import Phase
from workers.profile.schema import EMBEDDED_SCALES, ModelProfile

SHIPPED: Final = Path(__file__).parent / "embedded_scales"
"""Of models that ship with us, measured by `phasegate calibrate`."""


def checked_scale_file(profile: ModelProfile, phase: Phase) -> Path | None:
    """
    Raises:
        ScaleFileError: it is not for this cache or this model; the message begins with the profile's key.
    """
    part = profile.phase(phase)
    if part.kv_scales is None:
        return None
    name = part.kv_scales.removeprefix(EMBEDDED_SCALES)
    path = Path(name).expanduser() if name == part.kv_scales else SHIPPED / f"{name}.json"
    try:
        file = read_scale_file(path)
    except ScaleFileError as bad:
        raise ScaleFileError(f"{phase}.kv_scales: {bad}") from None
    if file.format is not part.format:
        raise ScaleFileError(
            f"{phase}.kv_scales: {path} is for a cache in {file.format}, not in {part.format}: make one with "
            "`phasegate calibrate`"
        )
    revisions = (file.source_revision, profile.source_revision)
    if None not in revisions and revisions[0] != revisions[1]:
        raise ScaleFileError(
            f"{phase}.kv_scales: {path} was measured with source_revision {revisions[0]!r}, the profile has "
            f"{revisions[1]!r}"
        )
    return path


def scale_file_sha256(profile: ModelProfile, phase: Phase) -> str:
    """Of the phase's scale file; empty when it has none.

    Raises:
        ScaleFileError: as `checked_scale_file`.
    """
    path = checked_scale_file(profile, phase)
    return "" if path is None else sha256_of(path)
