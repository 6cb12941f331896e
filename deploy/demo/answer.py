"""One user's streamed answer as it arrives, and whether all of it came."""

import json
from dataclasses import dataclass, field
from typing import Any

_DATA = "data: "
_DONE = "data: [DONE]"


@dataclass(slots=True)
class Answer:
    """Fed line by line."""

    arrivals: list[float] = field(default_factory=list)
    """When each chunk with text came."""
    tokens: int = 0
    """As the server counted them."""
    done: bool = False

    def take(self, line: str, at: float) -> None:
        """One line of the event stream. Raises ValueError for an error event and for what is no event."""
        if line == _DONE:
            self.done = True
        elif line.startswith(_DATA):
            self._event(json.loads(line.removeprefix(_DATA)), at)

    def _event(self, event: dict[str, Any], at: float) -> None:
        if "error" in event:
            raise ValueError(str(event["error"]))
        if any(_text(choice) for choice in event.get("choices", [])):
            self.arrivals.append(at)
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)

    def check(self, wanted: int) -> None:
        """Raises ValueError unless the stream ended as it should, with all the tokens it was asked for."""
        if not self.done:
            raise ValueError(f"the stream broke off after {len(self.arrivals)} chunks, without [DONE]")
        if self.tokens != wanted:
            raise ValueError(f"the answer has {self.tokens} tokens, asked for were {wanted}")


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
