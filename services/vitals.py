"""Whether an engine lives, from what was seen of it; nothing here depends on how long a queue is.

Steps are the signs of life: an engine that has work takes them, whoever waits behind it. One without work is asked for
one token now and then, the only sign that it can give; a token asked of a full engine would only measure its queue.
While a push has it paused no step is due, and the push's own watchdog looks after it.

Only time in which a step was due counts as silence: users who give up their requests to an engine that hangs do not
make it look alive, and one that was given nothing is not silent.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.config import HealthConfig


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the engine shows."""

    at: float
    """Seconds of a clock that never goes back."""
    steps: int
    """Taken since start."""
    busy: bool
    """It has requests in hand, probes left aside."""
    paused: bool
    """By a push whose watchdog runs."""
    probing: bool = False
    """A one-token probe is under way."""
    answered: int = 0
    """Probes that brought their token, since start."""
    failed: int = 0
    """Probes that the engine ended with an error, since start."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The newest look and what is known from all of them."""

    look: Look
    alive_at: float
    """Of the last sign of life."""
    silent_s: float = 0.0
    """Time since then in which a step was due."""


class Verdict(StrEnum):
    """ALIVE, without a sign of life for too long, or for good; WATCHED is the push's to judge."""

    ALIVE = "alive"
    WATCHED = "watched"
    SILENT = "silent"
    LOST = "lost"


def first_pulse(look: Look) -> Pulse:
    """An engine that has just started has shown that it lives."""
    return Pulse(look, look.at)


def probe_due(pulse: Pulse, config: HealthConfig) -> bool:
    """Whether to ask for one token: it has nothing to do, and either nothing was seen of it for a while or it failed
    to take a step that was due."""
    look = pulse.look
    if look.busy or look.probing or look.paused:
        return False
    return pulse.silent_s > 0 or look.at - pulse.alive_at >= config.probe_s


def follow(pulse: Pulse, look: Look, config: HealthConfig) -> Pulse:
    """What is known after another look.

    The time between two looks counts for no more than twice `look_s`: a process that was stopped itself, or a loop
    that was held up, has seen nothing, and the steps of that time are still to be read.
    """
    before = pulse.look
    if _lives(before, look):
        return Pulse(look, look.at)
    due = before.busy or before.probing or probe_due(pulse, config)
    if not due or before.paused or look.paused:
        return Pulse(look, pulse.alive_at, pulse.silent_s)
    return Pulse(look, pulse.alive_at, pulse.silent_s + min(look.at - before.at, 2 * config.look_s))


def judge(pulse: Pulse, config: HealthConfig) -> Verdict:
    """The verdict at the newest look."""
    if pulse.look.paused:
        return Verdict.WATCHED
    if pulse.silent_s >= config.dead_s:
        return Verdict.LOST
    return Verdict.SILENT if pulse.silent_s >= config.suspect_s else Verdict.ALIVE


def _lives(before: Look, look: Look) -> bool:
    if look.answered > before.answered:
        return True
    probe_alone = look.failed > before.failed or (look.probing and not look.busy)  # it is to bring its token
    return look.steps > before.steps and not probe_alone
