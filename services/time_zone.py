"""A setting that names a time zone."""

from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import AfterValidator


def _known(zone: str) -> str:
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"time_zone={zone!r} is not in this machine's time zone data") from None
    return zone


TimeZone = Annotated[str, AfterValidator(_known)]
"""Such as Europe/Berlin."""
