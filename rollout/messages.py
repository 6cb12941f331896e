"""Chat messages as the model's template sees them: with text for content."""

from collections.abc import Mapping, Sequence
from typing import Any


def joined_text(parts: Sequence[Any]) -> str:
    """The text of a message whose content is a list of parts. Raises ValueError for a part that is not text."""
    return "".join(map(_text, parts))


def _text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise ValueError(f"a text part needs text, not {part.get('text')!r:.80}")
        case {"type": kind}:
            raise ValueError(f"content part of type {kind!r:.80} is not supported; text parts are")
        case Mapping():
            raise ValueError("content part without a type is not supported; text parts are")
        case _:
            raise ValueError(f"content part {part!r:.80} is not an object; text parts are supported")
