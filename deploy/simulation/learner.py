"""The trainer and its gate for a large fleet: groups as amounts, judged a cohort at a time."""

import math
from collections import deque
from dataclasses import dataclass, field

from deploy.simulation.engine_model import WorkShape
from deploy.simulation.work import Training, is_stale

_ROUNDING = 1e-9


@dataclass(slots=True)
class _Cohort:
    """Groups that ended in one tick."""

    groups: float
    version: int
    """Of their oldest tokens."""


@dataclass(slots=True)
class Learner:
    """Without `training` groups are delivered as they end, and there is no gate."""

    training: Training | None
    shape: WorkShape
    version: int = 0
    trained: int = 0
    stale: float = 0.0
    """Groups."""
    _experience: deque[_Cohort] = field(default_factory=deque)
    _ends_at: float | None = None
    """Of the training step that runs."""
    _since: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """When the newest versions came."""

    def seats(self, replicas: int) -> float | None:
        """Samples that the gate lets each of so many replicas generate; None without a gate."""
        if self.training is None:
            return None
        return self._room(self.training) * self.shape.group / replicas

    def most(self, seconds: float) -> float:
        """Tokens that the gate lets all replicas generate in so short a time, however many they are."""
        if self.training is None:
            return math.inf
        groups = self._room(self.training) + self.training.batch_groups * seconds / self.training.step_s
        return groups * self.shape.group * self._each

    def generate(self, tokens: float, *, seats: float, now: float, seconds: float) -> None:
        """Samples in `seats` made so many in the `seconds` from `now` on; training steps end and begin in between."""
        if self.training is None:
            return
        if tokens > 0:
            began = now - self._each * seats * seconds / tokens
            later = sum(at > began for at in self._since)
            self._experience.append(_Cohort(tokens / (self._each * self.shape.group), self.version - later))
        self._learn(self.training, now, now + seconds)

    @property
    def _each(self) -> float:
        """Tokens of a sample, on average."""
        return sum(self.shape.tokens) / 2

    def _room(self, training: Training) -> float:
        """Groups that may be in generation."""
        in_step = training.batch_groups if self._ends_at is not None else 0
        return max(0.0, training.credits - self._waiting - in_step)

    @property
    def _waiting(self) -> float:
        return sum(cohort.groups for cohort in self._experience)

    def _learn(self, training: Training, now: float, until: float) -> None:
        free_at = now
        while True:
            if self._ends_at is None and self._take(training):
                self._ends_at = free_at + training.step_s
            if self._ends_at is None or self._ends_at > until:
                return
            free_at, self._ends_at = self._ends_at, None
            self.version += 1
            self.trained += training.batch_groups
            self._since.append(free_at)

    def _take(self, training: Training) -> bool:
        """A batch leaves the queue, oldest first; what is stale leaves it first."""
        while self._experience and self._is_stale(self._experience[0], training):
            self.stale += self._experience.popleft().groups
        missing = float(training.batch_groups)
        if self._waiting < missing - _ROUNDING:
            return False
        while missing > _ROUNDING and self._experience:
            taken = min(missing, self._experience[0].groups)
            self._experience[0].groups -= taken
            missing -= taken
            if self._experience[0].groups <= _ROUNDING:
                self._experience.popleft()
        return True

    def _is_stale(self, cohort: _Cohort, training: Training) -> bool:
        return is_stale([cohort.version] * self.shape.group, self.version, training.staleness)
