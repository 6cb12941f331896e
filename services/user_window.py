"""What users of one engine felt lately."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from rollout.percentile import percentile
from services.queued import Queued, Taken

_SHARE = 0.95
_FEWEST_REQUESTS = 20
"""Of fewer the percentile would be the slowest, and one user with a long prompt would speak for all."""
FEWEST_TOKENS, SHORTEST_S = 8, 1.0
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
    prompt: int = 0
    """Tokens of its prompt that the cache did not have."""
    request: str = ""
    """Whose it is, by the name that the engine was given; several sequences may be of one."""

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token; None before it."""
        return None if self.first is None else self.first - self.arrived

    @property
    def tpot_s(self) -> float | None:
        """Mean between two tokens; None of fewer."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


def _nothing(_begin: float, _end: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class _First:
    arrived: float
    at: float


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """95th percentiles; None where nothing was seen."""

    ttft_s: float | None = None
    """Of users' first tokens; whoever still waits counts with the time so far."""
    tpot_s: float | None = None
    """Of users' mean time between tokens."""


@dataclass(frozen=True, slots=True)
class Met:
    """What users felt, and what of it they would have felt alone."""

    felt: Pace = Pace()
    alone: Pace = Pace()


class UserWindow:
    """First tokens and the pace of tokens over the last `window_s`, from looks at the requests in the engine and from
    what it says of those that ended between two looks."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._firsts: deque[_First] = deque()
        self._marks: dict[str, deque[_Mark]] = {}
        self._live: Mapping[str, RequestTimes] = {}
        self._looked_at = 0.0
        self.queued = Queued()
        self._unseen = (f"unseen {number}" for number in count())
        """Names of sequences that no look found in the engine."""
        self.left: list[RequestTimes] = []
        """Who left between the two newest looks, with all their tokens or, given up by their clients, as last seen."""
        self.tokens = 0
        """That users got between the two newest looks."""
        self.ended: list[RequestTimes] = []
        """The same as far as a standstill had no part in it. Whoever left without a token that was seen has waited
        until the look before at least."""

    def look(
        self,
        now: float,
        live: Mapping[str, RequestTimes],
        *,
        ended: Sequence[RequestTimes] = (),
        still: float = 0.0,
    ) -> None:
        """Take in the requests that are in the engine now, by id, and those that `ended` there since the look before.
        First tokens of those that arrived before `still`, when generation last stood still, are not counted."""
        left = {name: times for name, times in self._live.items() if name not in live}
        gone = _last_words(left, ended, self._unseen)
        for name, times in live.items():
            self._take_in(name, times, still)
        for name, times in gone.items():
            self._take_in(name, times, still, over=True)
        self.left = list(gone.values())
        had = sum(times.tokens for times in self._live.values())
        # of those whom the first look finds it is not known
        self.tokens = sum(times.tokens for times in (*live.values(), *self.left)) - had if self._looked_at else 0
        self.ended = [end for times in self.left if (end := _end(times, self._looked_at, still)) is not None]
        self._live, self._looked_at = live, now
        self._forget(now - self._window_s)
        waiting = [(times.arrived, now) for times in live.values() if times.first is None]
        self.queued = Queued([*((first.arrived, first.at) for first in self._firsts), *waiting])

    def met(self, now: float, since: float, *, still: float, taken: Taken) -> Met:
        """After `since`, where rollouts have `taken` time."""
        alone = Pace(self.ttft_s(now, since, still=still, taken=taken), self.tpot_s(now, since, taken=taken))
        return Met(Pace(self.ttft_s(now, since, still=still), self.tpot_s(now, since)), alone)

    def met_lately(self, now: float, since: float, *, taken: Taken) -> Met:
        """The same of the whole window."""
        alone = Pace(self.ttft_lately_s(now, since, taken=taken), self.tpot_s(now, since, taken=taken))
        return Met(Pace(self.ttft_lately_s(now, since), self.tpot_s(now, since)), alone)

    def ttft_s(self, now: float, since: float, *, still: float = 0.0, taken: Taken = _nothing) -> float | None:
        """95th percentile over the window, or the newest few requests where it has fewer, with the time since `still`
        of all that wait; but no more than the worst of what came up after `since`, and None where nothing did. What
        others have `taken` while a user waited, or those ahead, is left out."""
        waiting = [self._wait(max(t.arrived, still), now, taken) for t in self._live.values() if t.first is None]
        waits = [(first, self._wait(first.arrived, first.at, taken)) for first in self._firsts]
        fresh = [wait for first, wait in waits if first.arrived >= since] + waiting
        all_of_them = percentile([wait for _, wait in waits] + waiting, _SHARE)
        return None if all_of_them is None or not fresh else min(all_of_them, max(fresh))

    def ttft_lately_s(self, now: float, since: float, *, taken: Taken = _nothing) -> float | None:
        """95th percentile over the window alone, of however few of those who came after `since`; None of nobody."""
        recent = (first for first in self._firsts if first.at >= now - self._window_s and first.arrived >= since)
        return percentile([self._wait(first.arrived, first.at, taken) for first in recent], _SHARE)

    def tpot_s(self, now: float, since: float, *, taken: Taken = _nothing) -> float | None:
        """95th percentile over requests of the mean time between the tokens they got after `since`, without what others
        have `taken` of it."""
        paces = (self._pace(name, marks, now, since, taken) for name, marks in self._marks.items())
        return percentile([pace for pace in paces if pace is not None], _SHARE)

    def _wait(self, came: float, first: float, taken: Taken) -> float:
        return first - came - (0.0 if taken is _nothing else self.queued.passed_on(came, first, taken))

    def _take_in(self, name: str, times: RequestTimes, still: float, *, over: bool = False) -> None:
        if times.first is None or times.last is None:
            return
        new = name not in self._live or self._live[name].first is None
        if new and times.arrived >= still:
            self._firsts.append(_First(times.arrived, times.first))
        marks = self._marks.setdefault(name, deque())
        if new and over:  # its first token was not seen, and there will be no other look
            marks.append(_Mark(times.first, 1))
        if not marks or marks[-1].tokens != times.tokens:
            marks.append(_Mark(times.last, times.tokens))

    def _pace(self, name: str, marks: Sequence[_Mark], now: float, since: float, taken: Taken) -> float | None:
        begin = next((mark for mark in marks if mark.at >= since), None)
        if begin is None:
            return None
        end = marks[-1]
        if end.tokens - begin.tokens < FEWEST_TOKENS and now - begin.at < SHORTEST_S:
            return None
        ends = [(end.at, end.tokens)] if end.tokens > begin.tokens else []
        if name in self._live:  # at best its next token comes now
            ends.append((now, end.tokens + 1))
        paces = (max(0.0, at - begin.at - taken(begin.at, at)) / (tokens - begin.tokens) for at, tokens in ends)
        return max(paces, default=None)

    def _forget(self, before: float) -> None:
        while len(self._firsts) > _FEWEST_REQUESTS and self._firsts[0].at < before:
            self._firsts.popleft()
        for name, marks in list(self._marks.items()):
            while marks and marks[0].at < before and (len(marks) > 1 or name not in self._live):
                marks.popleft()
            if not marks:
                del self._marks[name]


def _last_words(
    left: Mapping[str, RequestTimes], ended: Sequence[RequestTimes], unseen: Iterator[str]
) -> dict[str, RequestTimes]:
    """Who left, with all tokens where the engine told; and who was never seen, by names that nobody else has.

    >>> seen, whole = RequestTimes(0.0, None, None, 0, request="r"), RequestTimes(0.0, 0.1, 0.2, 3, request="r")
    >>> _last_words({"r-7": seen}, [whole, whole], iter(["a name"])) == {"r-7": whole, "a name": whole}
    True
    """
    gone = dict(left)
    names = defaultdict[str, list[str]](list)
    for name, times in left.items():
        names[times.request].append(name)
    for times in ended:
        seen = names[times.request]
        gone[seen.pop(0) if seen else next(unseen)] = times
    return gone


def _end(times: RequestTimes, seen_at: float, still: float) -> RequestTimes | None:
    """What can be told of a request, last seen at `seen_at`, that is over; None where a standstill met it before its
    first token. The newest ended at `still`."""
    if times.arrived >= still:
        return times if times.first is not None else replace(times, first=seen_at)
    met_later = times.first is not None and times.first < still
    return replace(times, last=times.first, tokens=1) if met_later else None
