"""What users and rollouts add to an engine's steps, and how much of their time rollouts took: the account of a replica,
look by look."""

from dataclasses import dataclass

from services.idle_speed import IdleSpeed
from services.step_cost import Steps
from services.time_taken import TimeTaken
from services.user_weight import UserWeight

_REST_S = 0.1
"""Of steps without rollouts, that a look stands for."""


@dataclass(frozen=True, slots=True)
class Present:
    """In an engine at a look."""

    users: int
    """In its steps."""
    rollouts: int
    """With a seat."""
    starting: int
    """Of them, those without a token."""
    begun: int
    """Tokens of prompts of all rollouts that had a seat until now."""
    turns: int
    """Rollouts that a step has room for; those who start come last."""


class StepAccount:
    """Begins with what the idle engine says."""

    def __init__(self, idle: IdleSpeed, seats: int, now: float) -> None:
        """Of an engine with so many `seats`, from `now` (monotonic) on."""
        self._idle = idle
        self._seats = seats
        self._before = Present(0, 0, 0, 0, 0)
        self.weight = UserWeight(idle, seats)
        self.taken = TimeTaken(now)

    def calibrate(self, idle: IdleSpeed) -> None:
        """The idle engine says something else now."""
        self._idle, self.weight = idle, UserWeight(idle, self._seats)

    def look(self, now: float, steps: Steps, present: Present, *, users_tokens: int, came: float, usual: bool) -> None:
        """After these `steps`, which brought users so many tokens; the first of those who are there `came` then.
        Unless they are the `usual` ones, they say nothing of what sequences add: those of a push are longer."""
        before, self._before = self._before, present
        users, rollouts = (before.users + present.users) / 2, (before.rollouts + present.rollouts) / 2
        if steps.count and usual:
            in_steps = steps.sequences_beside(users_tokens) / steps.count  # others sat them out
            self.weight.met(steps, users, min(rollouts, in_steps))
        self.taken.prompts((present.begun - before.begun) * self._idle.prefill_token_s)
        if rollouts:
            read = present.turns > present.rollouts - present.starting
            rollout_s = self.weight.rollout_s
            self.taken.book(now, steps, users_tokens=users_tokens, rollout_s=rollout_s, came=came, read=read)
        else:
            self.taken.rest(now, _REST_S)
        if not present.starting:
            self.taken.read()
