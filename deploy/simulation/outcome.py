"""The answer to the question: how many rollout tokens, at what risk to users, with these settings."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from deploy.simulation.day import TICK_S, Day, fleet_at_start, rates_met
from deploy.simulation.lend_day import LendDay, Lending
from deploy.simulation.lend_day import rates_met as rates_met_lending
from deploy.simulation.lent import Lent, lent_replica, sketch
from deploy.simulation.live import constant, play
from deploy.simulation.parts import Parts, ratio_interval
from deploy.simulation.response import Response, respond, settled_s, without_rollouts
from deploy.simulation.scene import Scene
from deploy.simulation.stay import longest_s
from deploy.simulation.trace import Arrival, Line, Load, load_of
from deploy.simulation.users import arrivals
from rollout.board import ReplicaRole
from rollout.errors import ConfigError

FEW_REPLICAS = 8
"""At most so many are simulated request by request."""
FEW_HOURS = 6.0
"""Replicas x hours; more take longer than a minute or two, and are simulated as a large fleet is."""
DAY_S = 86_400.0
_PARTS = 288
_MOST_WARM_S = 960.0
"""That users come before a trace begins, where answers take longer."""
_OTHER_SEED = 1_000_003
"""More than that of the trace, for users before it."""
_RARER = 1.25
"""Times the trainer's own pace: steps that are so much rarer are simulated again as rare as they are."""

Way = Literal["requests", "replicas"]
Trace = Callable[[], Iterable[Line]]
"""Reads it from its beginning."""
Progress = Callable[[str, float], None]
"""Hears what is done, and which share of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one fleet with one set of settings."""

    way: Way
    """Whether every request was simulated, or one replica at each load and the fleet as many of it."""
    seconds: float
    parts: Parts
    attainment_interval: tuple[float, float] | None
    """95 %; None without users."""
    attainment_alone: float | None
    """Without any rollout."""
    trained: int
    """Groups."""
    stale: int
    pushes: int
    lending: Lending | None = None
    """Of a fleet that lends."""

    @property
    def users(self) -> int:
        return round(float(self.parts.users.sum()))

    @property
    def refused(self) -> float:
        """Share of users whom the gateway refused, outside the SLO like all who were not answered."""
        return float(self.parts.refused.sum() / max(1e-9, self.parts.users.sum()))

    @property
    def attainment(self) -> float | None:
        """Share of users inside the SLO; None without users."""
        return self.parts.attainment

    @property
    def lost(self) -> float | None:
        """Attainment that rollouts cost."""
        if self.attainment is None or self.attainment_alone is None:
            return None
        return self.attainment_alone - self.attainment

    @property
    def tokens_per_day(self) -> float:
        """Of rollouts."""
        return float(self.parts.rollout_tokens.sum()) * DAY_S / self.seconds

    @property
    def user_tokens_per_day(self) -> float:
        return float(self.parts.user_tokens.sum()) * DAY_S / self.seconds

    @property
    def replicas(self) -> float:
        """On average."""
        return self.parts.mean("replicas")

    @property
    def rollouts(self) -> float:
        """In the seats of a replica, on average."""
        return self.parts.mean("rollouts") / max(1e-9, self.replicas)


def way_for(replicas: int, seconds: float, *, lends: bool = False) -> Way:
    """How a fleet is simulated unless it is said."""
    few = not lends and replicas <= FEW_REPLICAS and replicas * seconds <= FEW_HOURS * 3600
    return "requests" if few else "replicas"


def read_load(trace: Trace, *, seconds: float, progress: Progress) -> Load:
    """Of the users of so many seconds. Raises ConfigError for what is wrong with the trace."""
    return load_of(trace(), seconds=seconds, span_s=TICK_S, seen=lambda at: progress("trace", at / seconds))


def simulate(
    scene: Scene, trace: Trace, *, seconds: float, way: Way, progress: Progress, load: Load | None = None
) -> Outcome:
    """`attainment_alone` is for the caller to add, except in a fleet that lends, where it is that of the same replicas
    with none of them lent. `load` is the trace's, where it has been read before. Raises ConfigError for what is wrong
    with the scene or the trace."""
    scene.check()
    load = load or read_load(trace, seconds=seconds, progress=progress)
    if scene.lends and way == "requests":
        raise ConfigError("--way requests does not simulate fleet.sharing.mode=lend; leave it out, or say replicas")
    if scene.lends:
        return _by_lending(scene, load, progress)
    if way == "requests":
        return _by_request(scene, trace, load, seconds, progress)
    return _by_replica(scene, load, progress)


def beside_users_alone(outcome: Outcome, alone: Outcome) -> Outcome:
    """With the attainment of the same users without rollouts."""
    return replace(outcome, attainment_alone=alone.attainment)


def users_alone(scene: Scene) -> Scene:
    """The same fleet without rollouts and pushes."""
    return replace(scene, options=without_rollouts(scene.options), training=None, push_every_s=None)


def _by_request(scene: Scene, trace: Trace, load: Load, seconds: float, progress: Progress) -> Outcome:
    warm_s = max(settled_s(scene), min(_MOST_WARM_S, longest_s(scene, load.prompt, load.tokens)))
    story = play(
        scene,
        _warmed(scene, load, trace, warm_s),
        seconds=seconds,
        span_s=max(TICK_S, seconds / _PARTS),
        warm_s=warm_s,
        replicas=fleet_at_start(scene, load).running,
        seen=lambda at: progress("requests", at / (warm_s + seconds)),
    )
    interval = ratio_interval(story.parts.inside, story.parts.users, seed=scene.seed)
    return Outcome("requests", seconds, story.parts, interval, None, story.trained, story.stale, story.pushes)


def _warmed(scene: Scene, load: Load, trace: Trace, warm_s: float) -> Iterator[Arrival]:
    """The users of a trace, after as many as come at its beginning for so long: a guard that has just started has given
    rollouts no seat yet, and a fleet that runs has."""
    seed, prompt, tokens = scene.seed + _OTHER_SEED, round(load.prompt), round(load.tokens)
    yield from constant(load.beginning, seconds=warm_s, prompt=prompt, tokens=tokens, seed=seed)
    for user in arrivals(trace(), seconds=load.seconds, seed=scene.seed):
        yield replace(user, time=warm_s + user.time)


def _trained_day(scene: Scene, load: Load, step_s: float, progress: Progress) -> Day:
    """Each step pushes, and begins when its batch is full: how often that is what comes out of the day says."""
    day = _day(scene, load, step_s, progress)
    every_s = load.seconds / max(1, day.learner.version)
    return day if every_s <= _RARER * step_s else _day(scene, load, every_s, progress)


def _day(scene: Scene, load: Load, push_every_s: float | None, progress: Progress) -> Day:
    response = respond(
        scene,
        rates_met(scene, load),
        push_every_s=push_every_s,
        prompt=round(load.prompt),
        tokens=round(load.tokens),
        seen=lambda share: progress("one replica", share),
    )
    day = Day(scene, load, response, parts=_PARTS)
    day.run(lambda at: progress("the fleet", at / load.seconds))
    return day


def _by_replica(scene: Scene, load: Load, progress: Progress) -> Outcome:
    if scene.training is None:
        day = _day(scene, load, scene.push_every_s, progress)
        pushes = int(load.seconds // scene.push_every_s) if scene.push_every_s else 0
    else:
        day = _trained_day(scene, load, scene.training.step_s, progress)
        pushes = day.learner.version
    return Outcome(
        "replicas",
        load.seconds,
        day.parts,
        day.interval(seed=scene.seed),
        None,
        day.learner.trained,
        round(day.learner.stale),
        pushes,
    )


def _by_lending(scene: Scene, load: Load, progress: Progress) -> Outcome:
    every_s = scene.push_every_s if scene.training is None else scene.training.step_s
    lent = _lent(scene, every_s, progress)
    drawn = sketch(scene, prompt=load.prompt, tokens=load.tokens)
    response = respond(
        scene,
        rates_met_lending(scene, load, drawn, lent),
        push_every_s=None,
        prompt=round(load.prompt),
        tokens=round(load.tokens),
        role=ReplicaRole.SERVING,
        seen=lambda share: progress("one that serves", share),
    )
    day = _lend_day(scene, load, response, lent, progress)
    if scene.training is not None:
        every_s = load.seconds / max(1, day.learner.version)
        if every_s > _RARER * scene.training.step_s:
            day = _lend_day(scene, load, response, _lent(scene, every_s, progress), progress)
    alone = LendDay(scene, load, response, lent, parts=_PARTS, look_s=None)
    alone.run(lambda at: progress("none lent", at / load.seconds))
    return Outcome(
        "replicas",
        load.seconds,
        day.parts,
        day.interval(seed=scene.seed),
        alone.parts.attainment,
        day.learner.trained,
        round(day.learner.stale),
        int(load.seconds // every_s) if scene.training is None and every_s else day.learner.version,
        day.lending,
    )


def _lent(scene: Scene, push_every_s: float | None, progress: Progress) -> Lent:
    return lent_replica(
        scene,
        push_every_s=None if push_every_s is None else min(push_every_s, DAY_S),
        seen=lambda share: progress("one that is lent", share),
    )


def _lend_day(scene: Scene, load: Load, response: Response, lent: Lent, progress: Progress) -> LendDay:
    day = LendDay(scene, load, response, lent, parts=_PARTS)
    day.run(lambda at: progress("the fleet", at / load.seconds))
    return day
