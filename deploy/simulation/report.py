"""The answer as a table for a terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deploy.simulation.engine_model import WorkShape
from deploy.simulation.outcome import DAY_S, Outcome
from deploy.simulation.scene import Scene
from deploy.simulation.sweep import MARGIN, Choice, best
from deploy.simulation.work import Training

_DIGITS = 6
_SETTINGS = ("engine", "harvest", "sharing", "lending", "slo", "autoscaling", "push")
_SERIES = (
    "users",
    "inside",
    "refused",
    "user_tokens",
    "rollout_tokens",
    "replicas",
    "rollouts",
    "held",
    "limit",
    "lent",
    "harvesting",
    "noted_s",
)


def table(outcome: Outcome, scene: Scene) -> str:
    """Two columns."""
    slo = scene.promise
    targets = [f"{name} {1000 * s:g} ms" for name, s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if s is not None]
    rows = [
        ("replicas", f"{outcome.replicas:.4g} on average, at most {scene.replicas}"),
        ("users", f"{outcome.users} in {outcome.seconds / 3600:.4g} h"),
        ("rollout tokens a day", _count(outcome.tokens_per_day)),
        ("users' tokens a day", _count(outcome.user_tokens_per_day)),
        ("rollouts in a replica", f"{outcome.rollouts:.1f} of {scene.options.engine.max_num_seqs} seats on average"),
        (f"inside {', '.join(targets)}", _attainment(outcome)),
        ("none lent" if outcome.lending else "users alone", _percent(outcome.attainment_alone)),
        ("refused by the gateway", _refused(outcome, scene)),
        ("groups trained, stale", f"{outcome.trained}, {outcome.stale}" if scene.training else "no trainer"),
        ("pushes", str(outcome.pushes)),
        *_lending(outcome),
        ("rollouts", _work(scene.model.work)),
        ("simulated", "request by request" if outcome.way == "requests" else "one replica at each load"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def sweep_table(choices: Sequence[Choice]) -> str:
    """A line for each, and the one to take."""
    lines = ["most headroom  reserve  budget  rollout tokens a day  inside SLO  lost to rollouts"]
    lines += [_line(one, marked=one is best(choices)) for one in choices]
    words = f"* harvests most of those that cost users at most {100 * MARGIN:g} point"
    return "\n".join([*lines, words if best(choices) else f"all cost users more than {100 * MARGIN:g} point"])


def as_json(outcome: Outcome, scene: Scene, choices: Sequence[Choice] = ()) -> dict[str, Any]:
    """Everything, the settings and the engine included; the same seed gives the same bytes."""
    found: dict[str, Any] = {
        "replicas": scene.replicas,
        "seed": scene.seed,
        **_figures(outcome),
        "series": {"span_s": outcome.parts.span_s} | {name: _rounded(outcome, name) for name in _SERIES},
        "engine": scene.model.model_dump(mode="json"),
        "push_every_s": scene.push_every_s,
        "training": _training(scene.training),
        "settings": {
            **{name: getattr(scene.options, name).model_dump(mode="json") for name in _SETTINGS},
            "limits": scene.options.gateway.limits.model_dump(mode="json"),
        },
    }
    if choices:
        found["sweep"] = [
            {"most_headroom": c.most_headroom, "user_reserve": c.reserve, "budget": c.budget, **_figures(c.outcome)}
            for c in choices
        ]
    return found


def _training(training: Training | None) -> dict[str, Any] | None:
    if training is None:
        return None
    rules = training.staleness.model_dump(mode="json")
    return {"step_s": training.step_s, "batch_groups": training.batch_groups, "staleness": rules}


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "way": outcome.way,
        "seconds": outcome.seconds,
        "users": outcome.users,
        "attainment": outcome.attainment,
        "attainment_interval": outcome.attainment_interval,
        "attainment_alone": outcome.attainment_alone,
        "refused": outcome.refused,
        "rollout_tokens_per_day": outcome.tokens_per_day,
        "user_tokens_per_day": outcome.user_tokens_per_day,
        "mean_replicas": outcome.replicas,
        "rollouts_per_replica": outcome.rollouts,
        "groups_trained": outcome.trained,
        "groups_stale": outcome.stale,
        "pushes": outcome.pushes,
        "lending": None if outcome.lending is None else asdict(outcome.lending),
    }


def _lending(outcome: Outcome) -> list[tuple[str, str]]:
    """
    >>> from deploy.simulation.lend_day import Lending
    >>> from deploy.simulation.parts import Parts
    >>> found = Lending(lends=8, reclaims=6, returning_s=90, suffered_s=30, missed=4, replica_s=7200)
    >>> for name, text in _lending(Outcome("replicas", 43_200.0, Parts(10, 1), None, None, 0, 0, 0, found)):
    ...     print(f"{name}: {text}")
    replicas that rollouts had: 0.1667 on average
    switches a day: 16 to rollouts, 12 back
    users at reclaims: 4 outside for want of a replica that was on its way back, in 30 s
    """
    if (found := outcome.lending) is None:
        return []
    out, back = (count * DAY_S / outcome.seconds for count in (found.lends, found.reclaims))
    return [
        ("replicas that rollouts had", f"{found.replica_s / outcome.seconds:.4g} on average"),
        ("switches a day", f"{out:.4g} to rollouts, {back:.4g} back"),
        (
            "users at reclaims",
            f"{found.missed:.3g} outside for want of a replica that was on its way back, in {found.suffered_s:.0f} s",
        ),
    ]


def _rounded(outcome: Outcome, name: str) -> list[float]:
    return [round(float(value), _DIGITS) for value in getattr(outcome.parts, name)]


def _line(one: Choice, *, marked: bool) -> str:
    outcome = one.outcome
    lost = "" if outcome.lost is None else f"{100 * outcome.lost:.2f} points"
    budget = "yes" if one.budget else "no"
    return (
        f"{one.most_headroom:<13g}  {one.reserve:<7d}  {budget:<6}  {_count(outcome.tokens_per_day):<20}  "
        f"{_percent(outcome.attainment):<10}  {lost}{' *' if marked else ''}"
    )


def _attainment(outcome: Outcome) -> str:
    if outcome.attainment_interval is None:
        return _percent(outcome.attainment)
    low, high = outcome.attainment_interval
    return f"{_percent(outcome.attainment)} (95 % interval {_percent(low)} to {_percent(high)})"


def _refused(outcome: Outcome, scene: Scene) -> str:
    if not outcome.refused:
        return "none"
    most = scene.options.gateway.limits.max_user_requests
    return f"{_percent(outcome.refused)} of users, beyond fleet.gateway.limits.max_user_requests={most} at once"


def _percent(share: float | None) -> str:
    return "no users" if share is None else f"{100 * share:.2f} %"


def _work(work: WorkShape) -> str:
    """
    >>> _work(WorkShape(group=4, prompt_tokens=(16, 16), tokens=(64, 256)))
    'groups of 4, prompts of 16 tokens, answers of 64 to 256'
    """
    prompt, answer = (
        str(low) if low == high else f"{low} to {high}" for low, high in (work.prompt_tokens, work.tokens)
    )
    return f"groups of {work.group}, prompts of {prompt} tokens, answers of {answer}"


def _count(number: float) -> str:
    """
    >>> _count(12_345.0), _count(1.5e9), _count(0.0)
    ('12.3 thousand', '1.5 billion', '0')
    """
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.3g}"
