"""The states of a replica, what moves it from one to the next, and what it counts meanwhile.

    RESTARTING --started--> STALE <--behind / verified--> HEALTHY
                             ^ |                             |
                       alive | | silent                      | silent
                             | v                             |
                           SUSPECT <-------------------------+

    lost:    RESTARTING, STALE, HEALTHY, SUSPECT -> DEAD, where Serve puts another process, RESTARTING, in its place
    retired: any -> RETIRED, which is final

Rollouts are leased in HEALTHY alone. A dead engine comes back only as a new one, whose weights are verified before it
harvests; one that was only suspected passes by STALE too, where the weights of a run are checked again: they may have
fallen behind meanwhile, and nobody knows what kept the engine. A user's
request that fails is counted and moves nothing: an engine can fail every request and still step, or stand still before
any has failed.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from rollout.board import ReplicaState


class Event(StrEnum):
    """What a replica learns about itself."""

    STARTED = "started"
    """The engine is up, and a rehearsal has shown that its weights can be replaced."""
    VERIFIED = "verified"
    """The weights in use passed their check and are recent enough for rollouts."""
    BEHIND = "behind"
    """They did not, or they are not."""
    ALIVE = "alive"
    """The engine shows signs of life."""
    SILENT = "silent"
    """It has shown none for a while though it had work."""
    LOST = "lost"
    """It will show none any more, or it holds weights that cannot be used."""
    FAILED = "failed"
    """It answered a user's request with an error of its own."""
    RETIRED = "retired"
    """The replica leaves the fleet."""


_RUNNING = (ReplicaState.HEALTHY, ReplicaState.STALE, ReplicaState.SUSPECT)
_EDGES = {
    (ReplicaState.RESTARTING, Event.STARTED): ReplicaState.STALE,
    (ReplicaState.STALE, Event.VERIFIED): ReplicaState.HEALTHY,
    (ReplicaState.HEALTHY, Event.BEHIND): ReplicaState.STALE,
    (ReplicaState.HEALTHY, Event.SILENT): ReplicaState.SUSPECT,
    (ReplicaState.STALE, Event.SILENT): ReplicaState.SUSPECT,
    (ReplicaState.SUSPECT, Event.ALIVE): ReplicaState.STALE,
    **{(state, Event.LOST): ReplicaState.DEAD for state in (*_RUNNING, ReplicaState.RESTARTING)},
    **{(state, Event.RETIRED): ReplicaState.RETIRED for state in ReplicaState},
}


def next_state(state: ReplicaState, event: Event) -> ReplicaState:
    """The state after `event`; what is no edge of the diagram leaves it as it is.

    >>> next_state(ReplicaState.SUSPECT, Event.ALIVE), next_state(ReplicaState.DEAD, Event.ALIVE)
    (<ReplicaState.STALE: 'stale'>, <ReplicaState.DEAD: 'dead'>)
    """
    return _EDGES.get((state, event), state)


@dataclass(frozen=True, slots=True)
class Condition:
    """One replica's state, why it is in it, and its users' failed requests."""

    state: ReplicaState = ReplicaState.RESTARTING
    reason: str = "the engine starts"
    """Of the event that moved it here; empty where the state says all."""
    user_failures: int = 0
    """Since start."""

    def after(self, event: Event, reason: str = "") -> "Condition":
        """What it is once `event` has happened; `reason` is kept where it moves the state."""
        if event is Event.FAILED:
            return replace(self, user_failures=self.user_failures + 1)
        state = next_state(self.state, event)
        return self if state is self.state else replace(self, state=state, reason=reason)
