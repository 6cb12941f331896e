"""What users feel of one push: the longest wait for a token, the first one included, that overlaps it."""

import math
from collections.abc import Mapping

from services.user_window import RequestTimes

_MOST_AFTER_S = 30.0
"""Who waits longer after the push than this waits for something else too."""


class PushFelt:
    """From looks at users' sequences, which are to be so near to one another that few tokens come between two."""

    def __init__(self, begun: float) -> None:
        """Times are monotonic seconds."""
        self._begun = begun
        self._over_at = math.inf
        self._now = begun
        self._since: dict[str, float] = {}
        """When the wait began of those whose waits are not over: at the newest token, or at their arrival."""
        self.longest_s: float | None = None
        """None while no user's sequence was there."""

    @property
    def known(self) -> bool:
        """Whether the push is over, and with it all waits that it met."""
        return self._now > self._over_at and (not self._since or self._now - self._over_at > _MOST_AFTER_S)

    def over(self, now: float) -> None:
        """The push is. Whoever comes later is not met by it."""
        self._over_at = now

    def look(self, now: float, users: Mapping[str, RequestTimes]) -> None:
        """Take in the sequences that are in the engine now, by name.

        >>> felt, user = PushFelt(1.0), RequestTimes(0.0, first=0.3, last=0.9, tokens=7)
        >>> felt.look(1.1, {"a": user})
        >>> felt.over(1.2)
        >>> felt.look(1.3, {"a": user, "later": RequestTimes(1.25, None, None, 0)})
        >>> round(felt.longest_s, 3), felt.known
        (0.4, False)
        >>> felt.look(1.5, {"a": RequestTimes(0.0, first=0.3, last=1.4, tokens=8)})
        >>> round(felt.longest_s, 3), felt.known
        (0.5, True)
        """
        self._now = now
        self._since = {name: since for name, since in self._since.items() if name in users}
        for name, times in users.items():
            if name in self._since or now <= self._over_at:
                self._follow(name, times, now)

    def _follow(self, name: str, times: RequestTimes, now: float) -> None:
        newest = times.arrived if times.last is None else times.last
        begun = times.arrived if times.arrived >= self._begun else newest
        since = self._since.get(name, begun)
        for token in (times.first, times.last):
            if token is not None and token > since:
                self._waited(token - since)
                since = token
        self._waited(now - since)
        self._since[name] = since
        if since > self._over_at:
            del self._since[name]

    def _waited(self, seconds: float) -> None:
        self.longest_s = max(seconds, self.longest_s or 0.0)
