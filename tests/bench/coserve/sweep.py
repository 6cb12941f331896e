"""Which constants are measured to find the oracle of a load."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sweep:
    """The most seats that keep the SLO, by bisection: with more of them rollouts harvest more and users wait longer."""

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

    def seats(self) -> int | None:
        """The next ones to measure; None when it is over.

        >>> Sweep(32).seats(), Sweep(32, kept=16).seats(), Sweep(32, kept=16, broke=18).seats()
        (16, 24, None)
        >>> Sweep(32, kept=24).seats(), Sweep(32, kept=28).seats(), Sweep(32, kept=4, broke=8).seats()
        (28, None, 6)
        >>> Sweep(32, broke=2).seats(), Sweep(32, broke=1).seats()
        (1, None)
        """
        end = self.most + 1 if self.broke is None else self.broke
        width = max(self.width, self.finest * self.kept) if self.kept else 1
        return (self.kept + end) // 2 if end - self.kept > width else None

    def after(self, seats: int, *, kept: bool) -> "Sweep":
        """With the outcome of one measurement."""
        return replace(self, kept=seats) if kept else replace(self, broke=seats)
