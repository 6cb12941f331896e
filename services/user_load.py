"""Users' load on one replica, in terms that rollouts beside them do not change: arrivals, and idle service time."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.idle_speed import IdleSpeed

_PRIOR_TOKENS = 128.0
"""Of an answer, before the first has ended."""
_NEWEST_WEIGHT = 1 / 32
_SLOWNESS_BOUNDS = (0.1, 10.0)
"""Of one request to the probe; beyond is an accident, such as a client that read slowly."""


class Average:
    """Exponentially weighted; the first values weigh more, so that the prior is soon outweighed."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._count = 1

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(_NEWEST_WEIGHT, 1 / self._count) * (value - self.value)


class ArrivalRate:
    """Arrivals a second over the last `window_s`, of which seconds are kept, not arrivals."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, count: int) -> None:
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            count += self._seconds.pop()[1]
        self._seconds.append((second, count))

    @property
    def per_s(self) -> float:
        """Divided by the whole window also when the replica is younger: what users sent before, others counted."""
        oldest = self._clock() - self._window_s
        while self._seconds and self._seconds[0][0] <= oldest:
            self._seconds.popleft()
        return sum(count for _, count in self._seconds) / self._window_s


@dataclass(slots=True)
class Answer:
    """What one request has brought so far."""

    tokens: int = 0
    finished: bool = False
    """To its end, not given up by its client."""

    def got(self, item: Any) -> None:
        """One item of the stream that `LLMServer` returns."""
        self.tokens += response_tokens(item)


class UserLoad:
    """Fed with every request of users; asked by the autoscaler."""

    def __init__(
        self,
        speed: IdleSpeed,
        *,
        window_s: float,
        others: Callable[[], object | None],
        clock: Callable[[], float],
        prompt: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`others` tells what else the engine did: the same at two times between which it did nothing, and None while
        it does; `clock` counts seconds; `prompt` tells the tokens of users' prompts, on average, that are computed."""
        self._prompt = prompt
        self._speed = speed
        self._others = others
        self._clock = clock
        self._arrivals = ArrivalRate(window_s, clock)
        self._tokens = Average(_PRIOR_TOKENS)
        self._slowness = Average(1.0)
        """Of users' requests on the idle engine to the prediction."""
        self._begun = 0
        self._running = 0

    def calibrate(self, speed: IdleSpeed) -> None:
        """What the engine does with nothing else to do, measured again."""
        self._speed = speed

    @property
    def arrivals_per_s(self) -> float:
        """Sequences."""
        return self._arrivals.per_s

    @property
    def idle_service_s(self) -> float:
        """Of a sequence as long as users' are on average, as part of `capacity`."""
        return self._slowness.value * self._speed.busy_s(self._tokens.value, self._prompt())

    @property
    def capacity(self) -> float:
        """Seconds of idle service that the engine does in a second when all its seats are busy."""
        return self._speed.capacity

    @contextmanager
    def request(self, sequences: int) -> Iterator[Answer]:
        """One request from its arrival to its end; the caller tells the answer what came of it."""
        self._arrivals.add(sequences)
        answer, began = Answer(), self._clock()
        self._begun += 1
        mark = None if self._running or sequences > 1 else self._mark()
        self._running += 1
        try:
            yield answer
        finally:
            self._running -= 1
            if answer.tokens:
                self._tokens.add(answer.tokens / sequences)
            if answer.finished and answer.tokens and mark is not None and mark == self._mark():
                self._ran_alone(answer.tokens, self._clock() - began)

    def _mark(self) -> tuple[object, int] | None:
        """The same at two times between which nothing began; None while something else runs."""
        others = self._others()
        return None if others is None else (others, self._begun)

    def _ran_alone(self, tokens: int, seconds: float) -> None:
        low, high = _SLOWNESS_BOUNDS
        alone_s = self._speed.service_s(tokens) + self._speed.prompt_s(self._prompt())
        self._slowness.add(min(high, max(low, seconds / alone_s)))


def response_tokens(item: Any) -> int:
    """Of what `LLMServer` yields: a response with its usage, or events of a stream, each counted as a token until the
    engine tells how many there were.

    >>> response_tokens(["data: {}\\n\\n", "data: {}\\n\\ndata: [DONE]\\n\\n"])
    2
    """
    if isinstance(item, list | tuple):
        return sum(response_tokens(part) for part in item)
    if isinstance(item, str):
        return 0 if 'data: {"error"' in item else item.count("data: ") - item.count("data: [DONE]")
    return int(getattr(getattr(item, "usage", None), "completion_tokens", 0) or 0)
