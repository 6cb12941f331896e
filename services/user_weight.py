"""How many rollouts a user counts as: both have a token in each step, but users' prompts are computed for few tokens.

    weight  =  what a user adds to a step / what a rollout adds

Without it a batch in which users take the place of rollouts, one for one, has longer steps than before. What they add
is learned from the engine's steps (`services/step_cost.py`), and begins with what the idle engine says:

    a rollout  =  a sequence's share of a full step
    a user     =  that  +  what the prompt takes / tokens of the answer
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.idle_speed import IdleSpeed
from services.step_cost import StepCost, StepCosts, Steps
from services.user_window import RequestTimes

_MEMORY = 50
"""Users whose prompts and answers are remembered."""
_MOST = 8.0
"""However little a sequence adds to a step: where it is next to nothing it cannot be told from noise."""
_LEAST_SHARE = 0.25
"""Of what a sequence adds to a step of the idle engine, that a rollout is taken to add: a machine on which nothing but
users changes shows nothing of it."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A user who has all tokens."""

    tokens: int
    prompt: int
    """Tokens of it that the cache did not have."""
    prompt_s: float
    """That it took beyond the step of its first token, which others have theirs in too."""
    stay_s: float


class UserWeight:
    """Of the newest users of one engine."""

    def __init__(self, idle: IdleSpeed, seats: int) -> None:
        self._idle = idle
        self._sequence_s = idle.sequence_s(seats)
        self._ended: deque[_Ended] = deque(maxlen=_MEMORY)
        self._costs = StepCosts()
        self._expected = StepCost(max(0.0, idle.token_s - self._sequence_s), self._sequence_s, self._sequence_s)
        self._found = self._expected
        self.value = 1.0
        """From 1 to 8; 1 before a user ended."""
        self.stay_s = math.inf
        """Mean time that they are in the engine; infinite before one ended."""
        self.prompt = 0.0
        """Mean tokens of their prompts that the cache did not have."""

    @property
    def rollout_s(self) -> float:
        """That a rollout adds to each step."""
        return max(self._found.rollout_s, _LEAST_SHARE * self._sequence_s)

    def learn(self, ended: Sequence[RequestTimes]) -> None:
        """These users have all of their tokens.

        >>> weight = UserWeight(IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0, prefill_token_s=0.001), 33)
        >>> for size in (24, 124):
        ...     weight.learn([RequestTimes(0.0, 0.1, 1.0, tokens=20, prompt=size)] * 50)
        ...     round(weight.value, 2)
        1.77
        4.33
        """
        if not (known := [self._taken_down(times) for times in ended if times.tokens]):
            return
        self._ended.extend(known)
        self.prompt = sum(user.prompt for user in self._ended) / len(self._ended)
        self.stay_s = sum(user.stay_s for user in self._ended) / len(self._ended)
        prompts_s = sum(user.prompt_s for user in self._ended)
        user_s = self._sequence_s + prompts_s / sum(user.tokens for user in self._ended)
        self._expected = StepCost(self._expected.alone_s, user_s, self._sequence_s)
        self._weigh()

    def met(self, steps: Steps, users: float, rollouts: float) -> None:
        """The engine made these, with so many sequences in them on average."""
        self._costs.add(steps, users, rollouts)
        if self._ended:
            self._weigh()

    def _weigh(self) -> None:
        self._found = self._costs.found(self._expected)
        rollout_s = self.rollout_s
        self.value = min(_MOST, max(1.0, self._found.user_s / rollout_s)) if rollout_s > 0 else _MOST

    def _taken_down(self, times: RequestTimes) -> _Ended:
        idle = self._idle
        prompt_s = max(0.0, idle.first_token_s - idle.token_s) + idle.prompt_s(times.prompt)
        return _Ended(times.tokens, times.prompt, prompt_s, (times.last or times.arrived) - times.arrived)
