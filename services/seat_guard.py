"""How many sequences an engine may work on while its users stay within their SLO.

    inside the SLO:       limit += increase_per_s * seats * dt, where the limit is what holds rollouts back, and where
                          nobody was near an edge within the window
    near its edge:        limit *= ease
    outside, a breach:    limit *= decrease, once, and steps are users' alone until hold_s after the last look that
                          found it
    outside by itself:    nobody is let in until then, and who has a seat goes on, unless that lasts a whole window

The edge is a share of what users alone leave of a target. What they would feel alone is what they felt without what
rollouts took of the engine's time (`services/time_taken.py`): users of a busy engine are near their targets whoever is
beside them, and to keep rollouts out for it would help none of them.

In each step rollouts have what users leave of the limit, where each counts as the rollouts whose time it takes
(`user_weight`), so that a step takes as long with many users as with few; the others sit it out
(`services/step_room.py`). Seats are given by the users on the mean of late, for users come and go, and who has one
keeps it: a sample that is cut and let in again costs users its prefill for a handful of tokens. The limit has a
ceiling, which is learned from users too.

Additive increase, multiplicative decrease: Chiu and Jain, "Analysis of the increase and decrease algorithms for
congestion avoidance in computer networks", 1989.
"""

from dataclasses import dataclass, replace

from rollout.errors import ConfigError
from services.cache_room import KV_EDGE
from services.headroom import first_headroom
from services.idle_speed import IdleSpeed
from services.slo import SloConfig, attained, in_engine
from services.user_window import Met

_LEAST_SHARE = 0.1
"""Of the seats, beside users: a few rollouts can be seen to do no harm."""
_ONE = 1.0 + 1e-6
"""Rollout, whatever is added to it and taken off again."""
_MIN_ROLLOUTS = 1
"""Of an engine without users: with none there would be nothing to learn from."""
_SAME_S = 1.5
"""Without a look that finds users outside, before the next one is another time: a pace shows within a second."""


@dataclass(frozen=True, slots=True)
class Felt:
    """What users and the engine met lately; None where nothing was seen."""

    now: Met
    """Under the limit of now."""
    lately: Met
    """In the whole window, under whatever limit: what happens once in a few seconds says whether there is room for
    more, and may not have been felt yet under the limit of now."""
    step_s: float | None
    """Mean time of an engine step."""
    token_s: float | None
    """Mean time between two tokens of a sequence; less than a step where a step brings several."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    sequences: float
    """In its steps: of rollouts that have a turn, and of users by their weight."""
    beside: bool
    """Whether rollouts had a turn since the limit was last changed: only then is it to blame."""
    peak: float = 0.0
    """Most sequences of the last two seconds, but not before the limit was last changed: they come and go within what
    users felt."""
    taken: float = 0.0
    """Share of the last half second that rollouts took."""
    met_steps: int = 2
    """Steps with rollouts before the first token of whoever comes next: the one that is running, and the one that
    computes the prompt where rollouts do not give way to it."""


@dataclass(frozen=True, slots=True)
class Guard:
    """`limit` counts rollouts, and users by their weight."""

    limit: float
    closed_until: float = 0.0
    """No rollout is let in before."""
    closed_since: float = 0.0
    """When that began."""
    emptied_until: float = 0.0
    """No rollout is in a step before."""
    since: float = 0.0
    """What was felt earlier was felt under another limit, or has closed it."""


def next_guard(
    guard: Guard,
    felt: Felt,
    now: float,
    dt: float,
    *,
    slo: SloConfig,
    headroom: float,
    idle: IdleSpeed,
    seats: int,
    most: float,
) -> Guard:
    """The guard after `dt` seconds more, at `now` (monotonic), of an engine with `seats`: its limit is `most` at the
    most, and users are near an edge beyond the share `headroom` of what they alone leave of a target."""
    guard = replace(guard, limit=min(guard.limit, most))
    blamed = felt.beside and now >= guard.emptied_until
    if not attained(slo, felt.now.felt.ttft_s, felt.now.felt.tpot_s):
        return _breached(guard, felt, now, slo, blamed=blamed)
    if _near(felt.now, felt, slo, idle, headroom):
        # what was let in earlier and ends by itself says nothing of the limit
        eased = blamed and felt.sequences <= guard.limit + 1
        return replace(guard, limit=_less(guard, felt, slo.ease), since=now) if eased else guard
    # a limit that nothing reaches proves nothing
    if felt.sequences + 1 < guard.limit or _near(felt.lately, felt, slo, idle, headroom):
        return guard
    if not attained(slo, felt.lately.felt.ttft_s, felt.lately.felt.tpot_s):
        return guard
    return replace(guard, limit=min(most, guard.limit + slo.increase_per_s * seats * dt))


def _breached(guard: Guard, felt: Felt, now: float, slo: SloConfig, *, blamed: bool) -> Guard:
    until, began = now + slo.hold_s, guard.closed_since if now < guard.closed_until + _SAME_S else now
    closed = replace(guard, closed_until=until, closed_since=began, since=now)
    by_themselves = felt.kv_usage <= KV_EDGE and _missed_alone(slo, felt.now)
    # what rollouts add is an estimate, which must not have users wait for them to end by themselves
    if by_themselves and now - began < slo.window_s:
        return closed
    return replace(closed, limit=_less(guard, felt, slo.decrease) if blamed else guard.limit, emptied_until=until)


def _missed_alone(slo: SloConfig, met: Met) -> bool:
    """Whether users would miss every target that they miss without rollouts, too."""
    pairs = ((slo.ttft_s, met.felt.ttft_s, met.alone.ttft_s), (slo.tpot_s, met.felt.tpot_s, met.alone.tpot_s))
    return all(
        alone is not None and alone > target
        for target, felt, alone in pairs
        if target is not None and felt is not None and felt > target
    )


def guarded_seats(
    guard: Guard, now: float, *, total: int, reserve: int, users: int, mean: float, weight: float = 1.0
) -> int:
    """Seats that rollouts may be given now beside so many `users`, of whom there were so many on the `mean` of late.

    >>> guard = Guard(limit=20.7, closed_until=5.0)
    >>> [guarded_seats(guard, 6.0, total=32, reserve=4, users=users, mean=users) for users in (0, 6, 19, 40)]
    [20, 14, 1, 0]
    >>> guarded_seats(guard, 4.9, total=32, reserve=4, users=6, mean=6)
    0
    >>> guarded_seats(guard, 6.0, total=32, reserve=4, users=6, mean=2, weight=2.5)
    15
    """
    fitting = max(0, total - max(reserve, users))
    if now < guard.closed_until:
        return 0
    return min(fitting, max(int(guard.limit - weight * mean), 0 if users else _MIN_ROLLOUTS))


def most_limit(ceiling: float, seats: int, *, users: float, weight: float) -> float:
    """That the limit may be: the share `ceiling` of the highest, which leaves rollouts a turn with users in all seats,
    and at least what leaves them a few beside so many users on the mean, of whom there is something to learn.

    >>> [most_limit(ceiling, 64, users=users, weight=2.0) for ceiling, users in ((0.5, 8), (0.3, 30), (0.1, 0))]
    [64.0, 66.4, 12.8]
    """
    return max(ceiling * seats * weight, weight * users + max(_ONE, _LEAST_SHARE * seats))


def step_limit(guard: Guard, now: float) -> float:
    """Rollouts, and users by their weight, that a step may have beside users: after a breach users alone.

    >>> [step_limit(Guard(limit=20.0, emptied_until=5.0), now) for now in (4.9, 5.0)]
    [0.0, 20.0]
    """
    return 0.0 if now < guard.emptied_until else guard.limit


def _near(met: Met, felt: Felt, slo: SloConfig, idle: IdleSpeed, headroom: float) -> bool:
    """Whether anything that was met is beyond the share `headroom` of what is left of a target without rollouts; of a
    target of which nothing is left they are not kept from anything."""
    left = 1.0 - felt.taken
    figures = [(slo.ttft_s, met.felt.ttft_s, met.alone.ttft_s), (slo.tpot_s, met.felt.tpot_s, met.alone.tpot_s)]
    if felt.step_s is not None:  # that whoever comes next would meet
        steps_s = felt.met_steps * felt.step_s
        figures.append((slo.ttft_s, idle.first_token_s + steps_s, idle.first_token_s + left * steps_s))
    if felt.token_s is not None:
        figures.append((slo.tpot_s, felt.token_s, max(idle.token_s, left * felt.token_s)))
    return any(
        seen > edge(target, alone, headroom)
        for target, seen, alone in figures
        if target is not None and seen is not None and alone is not None and alone < target
    )


def edge(target: float, alone: float, headroom: float) -> float:
    """Of a target: beyond it rollouts use up more than the share `headroom` of what users `alone` leave of it.

    >>> [edge(1.0, alone, 0.75) for alone in (0.0, 0.5, 0.8, 1.2)]
    [0.75, 0.875, 0.95, 1.2]
    """
    return alone + headroom * max(0.0, target - alone)


def _less(guard: Guard, felt: Felt, share: float) -> float:
    """From what the engine really had, where the limit was above it."""
    return max(1.0, share * min(guard.limit, max(felt.sequences, felt.peak)))


def unattainable(slo: SloConfig, idle: IdleSpeed, way_s: float = 0.0) -> str:
    """Which target is below what users of an engine without any other work feel, whose first tokens take `way_s` beside
    it, and what that is; empty where none is."""
    way = f" and the way to it (gateway and router) took {way_s:.4g} s of late: raise slo.ttft_s" if way_s else ""
    figures = {"ttft_s": (slo.ttft_s, idle.first_token_s, way_s, way), "tpot_s": (slo.tpot_s, idle.token_s, 0.0, "")}
    missed = (
        f"slo.{name}={target:g} cannot be met: the idle engine needs {found:.4g} s{more}"
        for name, (target, found, more_s, more) in figures.items()
        if target is not None and target <= found + more_s
    )
    return next(missed, "")


def check_attainable(slo: SloConfig, idle: IdleSpeed) -> None:
    """Raises ConfigError where a target is below what the engine does without any other work."""
    if why := unattainable(slo, idle):
        raise ConfigError(why)


def cramped(slo: SloConfig, idle: IdleSpeed, *, seats: int, way_s: float, met_steps: int) -> str:
    """Why a target leaves rollouts hardly a turn beside a user: a single one of them, on an engine with so many
    `seats`, would bring the user near it. Empty where none does. `met_steps` is as in `Felt`.

    >>> idle = IdleSpeed(first_token_s=0.05, token_s=0.01, capacity=8.0)
    >>> def found(**slo):
    ...     return cramped(SloConfig(**slo), idle, seats=32, way_s=0.02, met_steps=2)[:15]
    >>> [found(ttft_s=0.095), found(ttft_s=0.11), found(tpot_s=0.0105), found(tpot_s=0.02)]
    ['slo.ttft_s=0.09', '', 'slo.tpot_s=0.01', '']
    """
    engine, one_s = in_engine(slo, way_s), idle.sequence_s(seats)
    way = f", with {way_s:.4g} s for the way," if way_s else ""
    steps = f"{met_steps} x {idle.token_s:.4g} s for the steps before a user's prompt"
    longer = f"{one_s:.3g} s for which a rollout makes each step longer"
    figures = (
        ("ttft_s", slo.ttft_s, engine.ttft_s, idle.first_token_s, met_steps * idle.token_s, f"{steps}{way}"),
        ("tpot_s", slo.tpot_s, engine.tpot_s, idle.token_s, one_s, longer),
    )
    share = first_headroom(slo, 0.0).share.at(0.0)
    return next(
        (
            f"slo.{name}={said:g} leaves rollouts hardly a turn beside users: {what} are above {share:.2g}"
            f" (0.8 x slo.most_headroom) of what the idle engine's {alone:.4g} s leave of it: raise slo.{name}"
            for name, said, target, alone, more_s, what in figures
            if said is not None and target is not None and alone + more_s > edge(target, alone, share)
        ),
        "",
    )
