"""A number of replicas that follows what is recommended only when that has lasted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Steady:
    """Moves to the recommendation nearest to it of a whole delay in which all lay on the same side.

    So one moment of less load takes no replica away, and one moment of more adds none.
    """

    value: int
    since: float | None = None
    """When the recommendations began to lie on one side of `value`, Unix seconds."""
    nearest: int = 0
    """The one nearest to `value` since then."""

    def follow(self, up: int, down: int, now: float, *, up_s: float, down_s: float) -> "Steady":
        """One step. It rises when `up` is above it for `up_s`, falls when `down` is below it for `down_s`; between
        `up` and `down`, which is not smaller, it rests."""
        if up > self.value:
            wanted, delay, nearer = up, up_s, min
        elif down < self.value:
            wanted, delay, nearer = down, down_s, max
        else:
            return Steady(self.value)
        since, nearest = now, wanted
        began = self.since
        # later than now: the clock was set back
        if began is not None and began <= now and (self.nearest > self.value) == (wanted > self.value):
            since, nearest = began, nearer(self.nearest, wanted)
        return Steady(nearest) if now - since >= delay else Steady(self.value, since, nearest)

    def at_most(self, limit: int) -> "Steady":
        """Down to `limit` at once."""
        return self if self.value <= limit else Steady(limit)
