"""What users of one engine felt lately."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RANK = 0.95
_FEWEST_TOKENS, _SHORTEST_S = 8, 1.0
"""A pace is taken from so many tokens, or over so long: one step with a prefill in it is not a pace."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One sequence of a user in the engine; times are monotonic seconds."""

    arrived: float
    first: float | None
    """Time of its first token; None before it."""
    last: float | None
    """Time of its newest token."""
    tokens: int


@dataclass(frozen=True, slots=True)
class _First:
    arrived: float
    at: float


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    tokens: int


class UserWindow:
    """First tokens and the pace of tokens over the last `window_s`, from looks at the requests in the engine.

    A request that begins and ends between two looks is not seen: it was faster than the looks are apart.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._firsts: deque[_First] = deque()
        self._marks: dict[str, deque[_Mark]] = {}
        self._live: Mapping[str, RequestTimes] = {}

    def look(self, now: float, live: Mapping[str, RequestTimes]) -> None:
        """Take in the requests that are in the engine now, by id."""
        for name, times in live.items():
            if times.first is not None and (name not in self._live or self._live[name].first is None):
                self._firsts.append(_First(times.arrived, times.first))
            if times.last is not None:
                marks = self._marks.setdefault(name, deque())
                if not marks or marks[-1].tokens != times.tokens:
                    marks.append(_Mark(times.last, times.tokens))
        self._live = live
        self._forget(now - self._window_s)

    def ttft_s(self, now: float, since: float, still: float = 0.0) -> float | None:
        """95th percentile over requests that arrived after `since`, with the time since `still` of all that wait."""
        found = [first.at - first.arrived for first in self._firsts if first.arrived >= since]
        waiting = [now - max(t.arrived, still) for t in self._live.values() if t.first is None]
        return percentile(found + waiting)

    def tpot_s(self, now: float, since: float) -> float | None:
        """95th percentile over requests of the mean time between the tokens they got after `since`."""
        paces = (self._pace(name, marks, now, since) for name, marks in self._marks.items())
        return percentile([pace for pace in paces if pace is not None])

    def _pace(self, name: str, marks: Sequence[_Mark], now: float, since: float) -> float | None:
        seen = [mark for mark in marks if mark.at >= since]
        if not seen:
            return None
        begin, end = seen[0], seen[-1]
        if end.tokens - begin.tokens < _FEWEST_TOKENS and now - begin.at < _SHORTEST_S:
            return None
        paces = [(end.at - begin.at) / (end.tokens - begin.tokens)] if end.tokens > begin.tokens else []
        if name in self._live:  # at best its next token comes now
            paces.append((now - begin.at) / (end.tokens - begin.tokens + 1))
        return max(paces, default=None)

    def _forget(self, before: float) -> None:
        while self._firsts and self._firsts[0].at < before:
            self._firsts.popleft()
        for name, marks in list(self._marks.items()):
            while marks and marks[0].at < before and (len(marks) > 1 or name not in self._live):
                marks.popleft()
            if not marks:
                del self._marks[name]


def percentile(values: Sequence[float]) -> float | None:
    """The 95th, by nearest rank; None of nothing.

    >>> percentile([0.3, 0.1, 0.2]), percentile([float(i) for i in range(1, 101)])
    (0.3, 95.0)
    """
    ranked = sorted(values)
    return ranked[math.ceil(_RANK * len(ranked)) - 1] if ranked else None
