"""Which constants are measured to find the oracle of a load."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sweep:
    """The most seats that keep the SLO, by bisection: with more of them rollouts harvest more and users wait longer.

    It begins at `first`, where that is given, and looks beside it before it halves what is left.
    """

    most: int
    """That can be asked for."""
    kept: int = 0
    """Most that kept the SLO; without rollouts it is kept."""
    broke: int | None = None
    """Fewest that broke it."""
    width: int = 2
    """`broke - kept` at which the search ends, or at `finest` of `kept`, where that is more; while none kept it 1."""
    finest: float = 0.2
    """By a fifth more seats rollouts harvest less than a fifth more, the less the more of them there are."""
    first: int | None = None
    """A guess."""

    def seats(self) -> int | None:
        """The next ones to measure; None when it is over.

        >>> Sweep(32).seats(), Sweep(32, kept=16).seats(), Sweep(32, kept=16, broke=18).seats()
        (16, 24, None)
        >>> Sweep(32, kept=24).seats(), Sweep(32, kept=28).seats(), Sweep(32, kept=4, broke=8).seats()
        (28, None, 6)
        >>> Sweep(32, broke=2).seats(), Sweep(32, broke=1).seats()
        (1, None)
        >>> guess = Sweep(32, first=10)
        >>> guess.seats(), guess.after(10, kept=True).seats(), guess.after(10, kept=False).seats()
        (10, 12, 8)
        >>> guess.after(10, kept=False).after(8, kept=False).seats(), replace(guess, first=40).seats()
        (4, 32)
        """
        end = self.most + 1 if self.broke is None else self.broke
        width = max(self.width, self.finest * self.kept) if self.kept else 1
        if end - self.kept <= width:
            return None
        return self._beside(self.first, end) if self.first is not None else (self.kept + end) // 2

    def _beside(self, first: int, end: int) -> int:
        """The guess, then what is as far from it as the search is fine, on the side where the answer is."""
        step = max(self.width, int(self.finest * (self.kept or end)))
        if self.broke is None:
            return min(self.most, max(1, self.kept + step if self.kept else first))
        return max(1, end - step) if not self.kept and self.broke >= first else (self.kept + end) // 2

    def after(self, seats: int, *, kept: bool) -> "Sweep":
        """With the outcome of one measurement."""
        return replace(self, kept=seats) if kept else replace(self, broke=seats)
