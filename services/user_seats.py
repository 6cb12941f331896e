"""Seats that users hold: one a sequence, as the engine counts them, however few requests ask for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def sequences(prompt: object, n: int | None) -> int:
    """How many sequences one request makes of an OpenAI `prompt` (text or token ids, or a list of either).

    >>> sequences("ab", None), sequences([5, 6, 7], 4), sequences(["a", "b"], 3), sequences([[5, 6], [7]], 1)
    (1, 4, 6, 2)
    """
    batched = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = len(prompt) if batched and isinstance(prompt, list) else 1
    return prompts * (n or 1)


class UserSeats:
    """How many users hold now, and how many of their requests have ended."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called after every change of `held`."""
        self._changed = changed
        self.held = 0
        self.requests_ended = 0

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """`count` seats for one request, until it ends or is given up."""
        self.held += count
        self._changed()
        try:
            yield
        finally:
            self.held -= count
            self.requests_ended += 1
            self._changed()
