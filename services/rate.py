"""Token buckets: how often something may be done, over seconds and in a burst. Pure: the time comes in."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """In any window of t seconds at most `burst + rate * t` are taken.

    >>> bucket = TokenBucket(rate=2.0, burst=1.0)
    >>> bucket.take(10.0), bucket.take(10.0), bucket.take(10.5)
    (0.0, 0.5, 0.0)
    """

    rate: float
    """Permits a second that come back."""
    burst: float
    """Permits that are there at most, and at first; one at least."""
    _left: float | None = None
    _at: float = 0.0

    def take(self, now: float) -> float:
        """0 if one was taken, else the seconds until there is one. `now`: seconds, of a clock that only rises."""
        if self._left is None:
            self._left = self.burst
        else:
            self._left = min(self.burst, self._left + self.rate * max(0.0, now - self._at))
        self._at = max(self._at, now)
        if self._left < 1:
            return (1 - self._left) / self.rate
        self._left -= 1
        return 0.0


class Rates:
    """A bucket for each key, with a second's permits as the burst. Keys are few: those of tokens that are known."""

    def __init__(self, per_s: float) -> None:
        """0 for no limit."""
        self.per_s = per_s
        self.burst = max(1.0, per_s)
        self._buckets: dict[bytes, TokenBucket] = {}

    def take(self, key: bytes, now: float) -> float:
        """As of the key's bucket."""
        if not self.per_s:
            return 0.0
        return self._buckets.setdefault(key, TokenBucket(self.per_s, self.burst)).take(now)
