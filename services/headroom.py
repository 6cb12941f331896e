"""How near to their SLO users may come before the guard's limit sinks, and how high that may be at the most: both
learned from users who shared the engine.

    a user ended outside:  a step down; after three in one moment nobody counts until it is over
    a user ended inside:   miss_share / (1 - miss_share) of such a step up
    none missed for long:  ten times as much
    none is near by them:  the ceiling grows with time
    nobody ends for long:  back to where learning began, if it is below that

The share is of what users alone leave of a target, and says how slow all of them may be. The ceiling, of a limit that
would leave rollouts a turn with users in all seats, says how much may be in a step that a user comes into. Both by the
load: how far single users lie from the mean, and what crowds come, depends on how many there are. What happens every
other minute is not in what users felt in the last seconds, by which a limit that was too high grows back.

Who ended outside counts for as much as rollouts are to blame (`services/added.py`): users who come at once wait for
each other, and to keep rollouts out for it would help none of them.

The pace of a mean step says nothing of how far single users lie from it; who missed a target does. Up and down balance
where `miss_share` of the users miss: Kaernbach, "Simple adaptive testing with the weighted up-down method", Perception
& Psychophysics 49, 1991. What lowered it may not have been the rollouts, or may be over: where they are kept out users
teach nothing, so time does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.added import Added, blame, used_up
from services.by_load import ByLoad, flat
from services.slo import SloConfig, attained
from services.user_window import FEWEST_TOKENS, SHORTEST_S, RequestTimes

_FIRST, _LEAST = 0.8, 0.2
"""Of `slo.most_headroom`: before anything is learned, and at the least."""
_STEP = 0.05
"""Of the logarithm, for one user who missed."""
_MOMENT_S, _MOST_OF_ONE = 2.0, 3
"""Misses within it have one cause, and the guard's answer to it takes a while to be felt: so many of them count. Users
who come at once miss at once, so that to count one alone would have more miss than may; to count all would have one
accident of the machine keep rollouts out for long. After them those who end inside count as little as those who miss,
or many would outvote any miss."""
_LONG_RUN, _LONG_RUN_STEPS = 5.0, 10.0
"""Users who end inside one after another until so many misses would have been expected of them: after a bad hour of the
machine there may be ten thousand to make up for, and by then it is over. Where misses balance it is seven runs of a
thousand that last so long, and users miss 9 exp(-5) more often for it, 6 %."""
_CEILING_STEP = 0.07
"""Of the logarithm, the same. By a seventh more rollouts twice as many users miss: larger steps would have the ceiling
swing between far too much and far too little, on average a fifth below what may be."""
_PROVEN = 0.25
"""Of the way (of the logarithm) from the ceiling down to what was reached of it, for one user who missed beside that:
so much may have been too much already, or the miss was an accident."""
_LEAST_CEILING = 0.1
"""Users who miss alone must not keep rollouts out for good: a few can be seen to do no harm."""
_NEAR, _CALM_S, _GROW_S = 0.75, 30.0, 75.0
"""Where for so long rollouts used up no more than that share of what any user left of a target, the ceiling is lower
than it has to be, and grows by a factor of e in the last: by time and not by users, of whom a quiet engine would need
an hour's to make up for one that missed."""
_HIGHEST = flat(1.0)
_BESIDE = 0.3
_FIRST_CEILING = flat(_BESIDE, alone=1.0)
"""Beside users of whom nothing is known: those who come before anything is learned find no more than that."""
LEARNED_S = _CALM_S - _GROW_S * math.log(_BESIDE)
"""Beside users who are far inside, until the ceiling holds nothing back any more: two minutes."""
_SILENT_S = 30.0
"""Without a user who teaches, before what was learned is forgotten."""
_FORGET_S = 300.0
"""In which it comes back most of the way to where it began."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """`share` of what users alone leave of a target, by the users in the engine."""

    share: ByLoad
    since: float = -math.inf
    """Users who came before it, monotonic, came under other settings."""
    missed_at: float = -math.inf
    """When the newest moment began in which users missed a target."""
    misses: float = 0.0
    """Of that moment, as far as they count."""
    run: float = 0.0
    """Users who ended inside since the newest miss."""
    taught_at: float = -math.inf
    ceiling: ByLoad = _HIGHEST
    """Share of the highest limit that the guard's may be, by the users in the engine."""
    near_at: float = -math.inf
    """When somebody last ended near a target for the rollouts' sake, or outside."""


def first_headroom(slo: SloConfig, now: float) -> Headroom:
    """Before any user came."""
    return Headroom(flat(_FIRST * slo.most_headroom), since=now, ceiling=_FIRST_CEILING, near_at=now)


def resumed(before: Headroom, *, left_at: float, now: float) -> Headroom:
    """The same at `now`, with an SLO again, when there was none from `left_at` on: in that time nobody could teach.

    >>> again = resumed(Headroom(flat(0.7), taught_at=90.0, near_at=80.0), left_at=100.0, now=500.0)
    >>> again.since, again.taught_at, again.near_at
    (500.0, 490.0, 480.0)
    """
    return replace(after_pause(before, now - left_at), since=now)


def after_pause(before: Headroom, seconds: float) -> Headroom:
    """The same so much later, when nobody could teach it anything meanwhile."""
    return replace(before, taught_at=before.taught_at + seconds, near_at=before.near_at + seconds)


def with_higher_ceiling(before: Headroom, factor: float, load: float) -> Headroom:
    """The same with a ceiling that is higher by the factor at that load, as far as it can be."""
    return replace(before, ceiling=_moved(before.ceiling, factor, load, _LEAST_CEILING, 1.0))


def next_headroom(
    before: Headroom,
    ended: Sequence[RequestTimes],
    now: float,
    dt: float,
    *,
    load: float,
    beside_at: float,
    added: Callable[[RequestTimes], Added],
    slo: SloConfig,
    reached: float = 1.0,
) -> Headroom:
    """After `dt` seconds more, at `now`, and these users; `load` were in the engine on average of late, before a crowd
    among them came. Rollouts last had a turn at `beside_at`, and `added` says what they added to what a user felt.
    At its most of late the engine worked on the share `reached` of the highest limit; it may be on less since.

    >>> slo, before = SloConfig(ttft_s=1.0, most_headroom=0.9, miss_share=0.01), Headroom(flat(0.7))
    >>> def after(before, ended, now=4.0, beside_at=3.0, by=Added(0.6, 0.0)):
    ...     return next_headroom(before, ended, now, 0.0, load=1, beside_at=beside_at, added=lambda _: by, slo=slo)
    >>> def share(*looked):
    ...     return round(after(*looked).share.at(1.0), 4)
    >>> fast, slow = RequestTimes(0.0, 0.5, 2.5, 9), RequestTimes(0.0, 1.5, 3.5, 9)
    >>> [share(before, ended) for ended in [(), (fast,), (slow,), (slow,) * 8, (fast,) * 999]]
    [0.7, 0.7004, 0.6662, 0.6049, 0.9]
    >>> after(lowered := after(before, [slow] * 3), [fast] * 99, now=5.0).share == lowered.share
    True
    >>> [round(lowered.share.at(load), 2) for load in (0.0, 1.0, 3.0, 7.0)]
    [0.65, 0.6, 0.65, 0.67]
    >>> parts = [Added(ttft_s, 0.0) for ttft_s in (0.0, 0.15, 0.6)]  # late by 0.5 s
    >>> share(before, [slow], 4.0, -1.0), [share(before, [slow], 4.0, 3.0, by) for by in parts]
    (0.7, [0.7, 0.6885, 0.6662])
    """
    met = [times for times in ended if before.since <= times.arrived <= beside_at]
    taught, blamed = _counted(met, added, slo)
    taught_at = now if taught else before.taught_at
    earlier = before.misses if now - before.missed_at < _MOMENT_S else 0.0
    if earlier >= _MOST_OF_ONE:
        return replace(before, taught_at=taught_at)
    misses = min(_MOST_OF_ONE - earlier, blamed)
    run = (before.run + taught) * max(0.0, 1.0 - misses)
    allowed = slo.miss_share * taught * (_LONG_RUN_STEPS if slo.miss_share * run > _LONG_RUN else 1.0)
    most = slo.most_headroom
    share = _moved(before.share, math.exp(_STEP * (allowed - misses)), load, _LEAST * most, most)
    near_at = now if any(_used_up(times, added, slo) > _NEAR for times in met) else before.near_at
    ceiling = _met_ceiling(before.ceiling, allowed, misses, load=load, reached=reached)
    if now - taught_at > _SILENT_S:
        share = share.raised(flat(_FIRST * most), dt / _FORGET_S)
        ceiling = ceiling.raised(_FIRST_CEILING, dt / _FORGET_S)
    elif now - near_at > _CALM_S:
        ceiling = _moved(ceiling, math.exp(dt / _GROW_S), load, _LEAST_CEILING, 1.0)
    return replace(
        before,
        share=share,
        missed_at=now if misses and not earlier else before.missed_at,
        misses=earlier + misses,
        run=run,
        taught_at=taught_at,
        ceiling=ceiling,
        near_at=near_at,
    )


def _counted(
    met: Sequence[RequestTimes], added: Callable[[RequestTimes], Added], slo: SloConfig
) -> tuple[float, float]:
    """Users who teach, and of them those who missed, each for as much as rollouts are to blame."""
    outside = [times for times in met if not attained(slo, times.ttft_s, _pace(times))]
    blamed = sum(blame(slo, times.ttft_s, _pace(times), added(times)) for times in outside)
    return len(met) - len(outside) + blamed, blamed


def _met_ceiling(ceiling: ByLoad, allowed: float, misses: float, *, load: float, reached: float) -> ByLoad:
    """After `misses` users missed, at that load, of those of whom `allowed` may, where the share `reached` of the
    highest limit was worked on."""
    learned = ceiling.at(load)
    # a ceiling that is far above what was too much does not hold that back
    nearer = math.log(max(_LEAST_CEILING, min(learned, reached)) / learned)
    proven = 1.0 - (1.0 - _PROVEN) ** misses
    factor = math.exp(proven * nearer + _CEILING_STEP * (allowed - misses))
    return _moved(ceiling, factor, load, _LEAST_CEILING, 1.0)


def _moved(learned: ByLoad, factor: float, load: float, least: float, most: float) -> ByLoad:
    """By as much as it can be at that load: a night in which all has been learned says nothing more of the evening."""
    before = learned.at(load)
    found = min(most, max(least, before * factor))
    if math.isclose(found, before):
        return learned
    return learned.times(found / before, load).each(lambda value: min(most, max(least, value)))


def _used_up(times: RequestTimes, added: Callable[[RequestTimes], Added], slo: SloConfig) -> float:
    """Of what this user left of the targets."""
    return used_up(slo, times.ttft_s, _pace(times), added(times))


def _pace(times: RequestTimes) -> float | None:
    tpot_s = times.tpot_s
    long = times.tokens > FEWEST_TOKENS or tpot_s is None or tpot_s * (times.tokens - 1) >= SHORTEST_S
    return tpot_s if long else None
