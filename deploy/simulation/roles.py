"""How many replicas of a fleet have which role: what was wished for, and the time that it takes.

serve -- drain_s --> in between -- out_s --> harvest -- back_s --> serve
   ^______|  recalled at once, or not through in time
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Cohort:
    """Replicas that change together; times are seconds."""

    count: int
    began: float
    until: float
    held: float = 0.0
    """Users in each of them when they began."""
    stays: bool = False
    """They do not get rid of their users in time, and go on serving."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds."""

    out_s: float
    """From the last user to rollouts."""
    back_s: float
    """From the recall to users."""
    drain_s: float
    """The longest that a replica waits for its last user."""
    rest_s: float
    """That one which could not be lent is left alone."""


@dataclass(slots=True)
class Roles:
    """Counts of replicas; call `advance` at every moment before the others."""

    pace: Pace
    running: int
    """All of them."""
    harvesting: int = 0
    lends: int = 0
    """Times that a replica went to rollouts."""
    reclaims: int = 0
    """Times that one came back from there."""
    _draining: list[_Cohort] = field(default_factory=list)
    _entering: list[_Cohort] = field(default_factory=list)
    _returning: list[_Cohort] = field(default_factory=list)
    _resting: list[_Cohort] = field(default_factory=list)

    @property
    def towards(self) -> int:
        """Lent, or on their way there."""
        return _size(self._draining) + _size(self._entering) + self.harvesting

    @property
    def returning(self) -> int:
        return _size(self._returning)

    @property
    def away(self) -> int:
        """That take no new users."""
        return self.towards + self.returning

    @property
    def serving(self) -> int:
        return self.running - self.away

    def left_behind(self, now: float) -> float:
        """Users whose answers end on replicas that are to be lent: fewer with time, evenly."""
        return sum(c.count * c.held * (c.until - now) / max(1e-9, c.until - c.began) for c in self._draining)

    def resize(self, running: int) -> int:
        """More or fewer serve; where not so many do, others go. Returns how many of those were lent."""
        lent, self.running = self.towards, running
        gone = max(0, self.away - running)
        for cohorts in (self._draining, self._entering):
            gone -= _take(cohorts, gone)
        harvested = min(gone, self.harvesting)
        self.harvesting -= harvested
        _take(self._returning, gone - harvested)
        return lent - self.towards

    def advance(self, now: float) -> None:
        """Whose time is over goes on."""
        for cohort in _done(self._draining, now):
            if cohort.stays:
                self._resting.append(_Cohort(cohort.count, now, cohort.until + self.pace.rest_s))
            else:
                self._entering.append(_Cohort(cohort.count, cohort.until, cohort.until + self.pace.out_s))
        for cohort in _done(self._entering, now):
            self.harvesting += cohort.count
            self.lends += cohort.count
        self.reclaims += sum(cohort.count for cohort in _done(self._returning, now))
        _done(self._resting, now)

    def follow(self, wished: int, now: float, *, held: float, stay_s: float) -> int:
        """Lend and call back until so many are lent; a replica has `held` users, and each of them stays for `stay_s`.
        Returns how many are called back from rollouts."""
        if (missing := wished - self.towards) > 0:
            self._lend(min(missing, self.serving - _size(self._resting)), now, held, stay_s)
        return self._call_back(max(0, -missing), now)

    def _lend(self, count: int, now: float, held: float, stay_s: float) -> None:
        if count <= 0:
            return
        # the last of `held` users who came at any time leaves after so much of what one stays, on average
        seconds = stay_s * held / (held + 1)
        until = now + min(seconds, self.pace.drain_s)
        self._draining.append(_Cohort(count, now, until, held, stays=seconds > self.pace.drain_s))

    def _call_back(self, count: int, now: float) -> int:
        """First those that are not emptied yet, which serve at once, then those with the fewest samples."""
        count -= _take(self._draining, count)
        for cohort in reversed(self._entering):  # whose swap ends before the one back begins
            part = min(count, cohort.count)
            cohort.count, count = cohort.count - part, count - part
            self._return(part, now, cohort.until + self.pace.back_s)
        self._entering = [cohort for cohort in self._entering if cohort.count]
        called = min(count, self.harvesting)
        self.harvesting -= called
        self._return(called, now, now + self.pace.back_s)
        return called

    def _return(self, count: int, now: float, until: float) -> None:
        if count:
            self._returning.append(_Cohort(count, now, until))


def _size(cohorts: list[_Cohort]) -> int:
    return sum(cohort.count for cohort in cohorts) if cohorts else 0


def _done(cohorts: list[_Cohort], now: float) -> list[_Cohort]:
    """Those whose time is over, which leave the list."""
    if not cohorts:
        return []
    done = [cohort for cohort in cohorts if cohort.until <= now]
    if done:
        cohorts[:] = [cohort for cohort in cohorts if cohort.until > now]
    return done


def _take(cohorts: list[_Cohort], count: int) -> int:
    """At most so many leave, the newest first; returns how many did."""
    taken = 0
    for cohort in reversed(cohorts):
        part = min(cohort.count, count - taken)
        cohort.count -= part
        taken += part
    cohorts[:] = [cohort for cohort in cohorts if cohort.count]
    return taken
