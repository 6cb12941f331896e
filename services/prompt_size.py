"""How large a prompt may be before it is tokenised: tokenising takes time for each character, on one thread for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api_errors import ApiError, over_limit
from services.config import FleetConfig

CHARS_PER_TOKEN = 16
"""Four to five are usual of English, fewer of code and of other scripts; of long runs of blanks there are more, and
then the operator says how many characters a prompt may have."""


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Of each prompt."""

    max_tokens: int
    """`engine.max_model_len`"""
    max_chars: int
    knob: str

    @classmethod
    def of(cls, fleet: FleetConfig) -> "PromptBounds":
        longest, most = fleet.engine.max_model_len, fleet.gateway.limits.max_prompt_chars
        if most is not None:
            return cls(longest, most, "gateway.limits.max_prompt_chars")
        knob = (
            f"gateway.limits.max_prompt_chars, by default {CHARS_PER_TOKEN} for each of engine.max_model_len={longest}"
        )
        return cls(longest, CHARS_PER_TOKEN * longest, knob)

    def check(self, prompt: Any, options: Mapping[str, Any], field: str, status: int) -> int:
        """The size of a prompt as its characters or token ids, `options` of a chat template included.

        Raises ApiError for one that is too large to be looked at.
        """
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            if len(prompt) > self.max_tokens:
                message = (
                    f"{field}: {len(prompt)} prompt tokens, over the model's context of {self.max_tokens} "
                    "(engine.max_model_len)"
                )
                raise ApiError(status, message, code="context_length_exceeded", param=field)
            return len(prompt)
        chars = characters(prompt, self.max_chars) + (characters(options, self.max_chars) if options else 0)
        if chars > self.max_chars:
            more = "" if isinstance(prompt, str) else " or more"
            raise over_limit(status, field, f"{chars} characters{more}", self.max_chars, self.knob)
        return chars


def characters(value: Any, enough: int) -> int:
    """Of all text in a tree of JSON, keys included; what comes after `enough` is not counted.

    Numbers, brackets and what is empty count as well: templates print them.

    >>> characters("Hello", 100), characters([{"role": "user"}], 100), characters([1, None, ""], 100)
    (5, 12, 8)
    """
    found, left = 0, [value]
    while left and found <= enough:
        item = left.pop()
        if isinstance(item, str):
            found += len(item) or 1
        elif isinstance(item, Mapping):
            found += 2
            left += item.keys()
            left += item.values()
        elif isinstance(item, Sequence):
            found += 2
            left += reversed(item)
        else:
            found += len(str(item))
    return found
