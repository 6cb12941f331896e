"""How many replicas serve: the product's decision, and the time that a start takes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout.errors import ConfigError
from services.autoscaling.budget import RolloutBudget
from services.autoscaling.decision import Scaling, Wanted, begin, decide
from services.autoscaling.demand import FleetLoad
from services.autoscaling.windows import window
from services.config import FleetOptions

FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""Unix seconds; a Thursday in winter. Offsets of time zones were others when Unix time began."""


def scaling_of(options: FleetOptions, replicas: int) -> Scaling:
    """For at most `replicas`; settings of a fixed size (`min_replicas` = `max_replicas`) keep all of them. Raises
    ConfigError where others have fewer than their least."""
    config = options.autoscaling
    fixed = config.min_replicas == config.max_replicas
    if not fixed and replicas < config.min_replicas:
        raise ConfigError(f"--replicas {replicas} is below fleet.autoscaling.min_replicas={config.min_replicas}")
    budget = config.rollout_budget
    return Scaling(
        min_replicas=replicas if fixed else config.min_replicas,
        max_replicas=replicas,
        target_utilisation=config.target_utilisation,
        hysteresis=config.hysteresis,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        min_serving=options.lending.min_serving if options.sharing.mode == "lend" else 0,
        rollout_budget=None
        if budget is None
        else RolloutBudget(
            tuple(window(text) for text in budget.windows),
            budget.time_zone,
            budget.extra_replicas,
            budget.replica_hours_per_day,
        ),
    )


@dataclass(slots=True)
class Fleet:
    """Replicas that run, and those that start; times are seconds from a midnight, UTC."""

    scaling: Scaling
    start_s: float
    running: int
    starting: list[float] = field(default_factory=list)
    """When each is up."""
    _wanted: Wanted | None = None

    def follow(self, load: FleetLoad, now: float) -> int:
        """One decision; returns how many run now. Starts that are not needed any more are given up first."""
        self.running += sum(at <= now for at in self.starting)
        self.starting = [at for at in self.starting if at > now]
        self._wanted = decide(self._wanted or begin(self.running), load, FIRST_DAY + now, self.scaling)
        missing = self._wanted.total - self.running - len(self.starting)
        if missing > 0:
            self.starting += [now + self.start_s] * missing
        elif missing < 0:
            kept = max(0, len(self.starting) + missing)
            self.running -= max(0, -missing - len(self.starting))
            self.starting = self.starting[:kept]
        return self.running


class Arrivals:
    """Users a second as replicas count them, over the autoscaler's window; so many came before the first tick."""

    def __init__(self, window_s: float, tick_s: float, before: float) -> None:
        ticks = max(1, round(window_s / tick_s))
        self._rates = deque([before] * ticks, maxlen=ticks)

    def counted(self, rate: float) -> float:
        """With one more tick of such a rate.

        >>> seen = Arrivals(30.0, 10.0, 3.0)
        >>> [seen.counted(rate) for rate in (3.0, 6.0, 6.0, 6.0)]
        [3.0, 4.0, 5.0, 6.0]
        """
        self._rates.append(rate)
        return sum(self._rates) / len(self._rates)


def first_replicas(scaling: Scaling, needed: Sequence[int] | int) -> int:
    """How many a fleet has at the beginning: as if it had been there before."""
    count = needed if isinstance(needed, int) else max(needed, default=0)
    return min(scaling.max_replicas, max(scaling.min_replicas, count))
