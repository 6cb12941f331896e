"""What every body of a request is checked by: nothing unknown is taken, and what is wrong is found once.

A parser that goes on after the first wrong item keeps an error for each, and each takes a thousand bytes: of one
mebibyte of wrong token ids that was 700 MiB, and two seconds of the event loop. Lists of what clients send therefore
carry `fail_fast`, and of unknown fields one is enough.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class StrictBody(BaseModel):
    """Base of the bodies and of the objects in them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = {name: given for name, given in value.items() if name in cls.model_fields}
        unknown = next((name for name in value if name not in known), None)
        return known if unknown is None else known | {unknown: value[unknown]}
