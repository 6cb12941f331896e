"""The policy that Serve's controller calls, ten times a second.

As YAML: `autoscaling_config: {policy: {policy_function: "services.autoscaling:UserLoadPolicy", policy_kwargs: {...}}}`
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict

from services.autoscaling.budget import RolloutBudget
from services.autoscaling.decision import Scaling, Wanted, begin, decide
from services.autoscaling.demand import FleetLoad, fleet_load
from services.autoscaling.stats import ReplicaStats
from services.autoscaling.windows import window


class BudgetArguments(TypedDict):
    """`rollout_budget` as JSON."""

    windows: list[str]
    time_zone: str
    extra_replicas: int
    replica_hours_per_day: float | None


class Context(Protocol):
    """What is used of Serve's AutoscalingContext."""

    target_num_replicas: int
    running_replicas: Sequence[Any]
    raw_metrics: Mapping[str, Mapping[Any, Sequence[Any]]] | None
    """Of each figure and replica the latest values, oldest first."""
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float


class UserLoadPolicy:
    """Its arguments are Serve's `policy_kwargs`; bounds are Serve's `min_replicas` and `max_replicas`.

    Serve's own `upscale_delay_s` and `downscale_delay_s` come on top and belong at 0: they follow the last
    recommendation, whatever came before it. One object decides for one deployment, until its settings change.
    """

    def __init__(
        self,
        *,
        target_utilisation: float,
        hysteresis: float,
        upscale_delay_s: float,
        downscale_delay_s: float,
        min_serving: int = 0,
        rollout_budget: BudgetArguments | None = None,
    ) -> None:
        """`min_serving` is the lender's. Raises ValueError where a window cannot be read."""
        self._utilisation = target_utilisation
        self._hysteresis = hysteresis
        self._delays_s = (upscale_delay_s, downscale_delay_s)
        self._min_serving = min_serving
        self._budget = None if rollout_budget is None else _budget(rollout_budget)
        self._wanted: Wanted | None = None

    def __call__(self, ctx: Context) -> tuple[int, dict[str, Any]]:
        """Replicas wanted; there is no state that Serve has to keep."""
        if self._wanted is None or self._wanted.total == 0 < ctx.target_num_replicas:
            # at first; or Serve has started one for a request, which no replica could report
            self._wanted = begin(ctx.target_num_replicas)
        self._wanted = decide(self._wanted, _load(ctx), ctx.current_time, self._scaling(ctx))
        return self._wanted.total, {}

    def _scaling(self, ctx: Context) -> Scaling:
        return Scaling(
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
            target_utilisation=self._utilisation,
            hysteresis=self._hysteresis,
            upscale_delay_s=self._delays_s[0],
            downscale_delay_s=self._delays_s[1],
            min_serving=self._min_serving,
            rollout_budget=self._budget,
        )


def _budget(arguments: BudgetArguments) -> RolloutBudget:
    return RolloutBudget(
        windows=tuple(window(text) for text in arguments["windows"]),
        time_zone=arguments["time_zone"],
        extra_replicas=arguments["extra_replicas"],
        replica_hours_per_day=arguments["replica_hours_per_day"],
    )


def _load(ctx: Context) -> FleetLoad:
    newest = (_newest(ctx, replica) for replica in ctx.running_replicas)
    return fleet_load([stats for stats in newest if stats is not None], running=len(ctx.running_replicas))


def _newest(ctx: Context, replica: Any) -> ReplicaStats | None:
    """None before the replica's first report."""
    series = ctx.raw_metrics or {}
    reports = {name: series[name][replica] for name in _NAMES if series.get(name, {}).get(replica)}
    lasting = {name: _lasting(name, values) for name, values in reports.items()}
    return ReplicaStats(**lasting) if len(lasting) == len(_NAMES) else None  # type: ignore[typeddict-item]


def _lasting(name: str, reports: Sequence[Any]) -> float:
    """Of the last two reports, seconds apart, where the newest is but a moment: one request of many sequences, or
    rollouts cut for a push, is no load that lasts."""
    chosen = _MOMENTARY.get(name)
    return reports[-1].value if chosen is None else chosen(report.value for report in reports[-2:])  # type: ignore[no-any-return]


_NAMES = tuple(ReplicaStats.__annotations__)
_MOMENTARY: Mapping[str, Any] = {"user_seats_held": min, "rollout_seats": max}
