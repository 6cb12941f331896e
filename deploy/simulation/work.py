"""Rollout work without end, behind the training gate; and the trainer at its other end.

fresh | given back --lease--> replica --complete--> experience --judge--> step --> version --> push
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deploy.simulation.engine_model import WorkShape
from rollout.staleness import judge
from rollout.types import FinishReason, Group, Sample, Segment, Timings, VersionSpan
from trainer.config import StalenessConfig

_TOKEN = np.zeros(1, dtype=np.int32)
_LOGPROB = np.zeros(1, dtype=np.float32)
_TRAINED = np.ones(1, dtype=np.uint8)


@dataclass(slots=True, eq=False)
class Rollout:
    """One sample of a group."""

    group: "Task"
    left: int
    kept: int = 0
    version: int | None = None
    """Of its oldest token."""
    cached: tuple[object, int] | None = None
    """Replica that it left last, and how many pushes there had been."""


@dataclass(slots=True, eq=False)
class Task:
    """A group of rollouts."""

    prompt: int
    samples: list[Rollout] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(not sample.left for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Training:
    """A trainer's pace and rules."""

    step_s: float
    batch_groups: int
    staleness: StalenessConfig

    @property
    def credits(self) -> int:
        """Groups in generation and not trained yet, at most."""
        return (self.staleness.eta + 1) * self.batch_groups


@dataclass(slots=True)
class Ledger:
    """Groups by what became of them; `accepted` is the sum of the others and what is in flight."""

    accepted: int = 0
    trained: int = 0
    stale: int = 0
    delivered: int = 0


class Work:
    """The queue and the trainer; without `training` groups are delivered as they end."""

    def __init__(self, shape: WorkShape, training: Training | None, *, seed: int) -> None:
        self._shape = shape
        self._training = training
        self._source = random.Random(seed)
        self._returned: deque[Task] = deque()
        self._experience: deque[Task] = deque()
        self._fit: list[Task] = []
        """Judged, and waiting for a batch to be full: there is no new version before it is trained."""
        self._batch: list[Task] = []
        self._leased = 0
        self.version = 0
        self.ledger = Ledger()

    @property
    def in_flight(self) -> int:
        """Groups that are not at their end."""
        return self._leased + len(self._returned) + len(self._experience) + len(self._fit) + len(self._batch)

    @property
    def room(self) -> int:
        """Groups that could be leased now; without a gate there is always one."""
        if self._training is None:
            return 1
        return len(self._returned) + max(0, self._training.credits - self.in_flight)

    def lease(self) -> Task | None:
        """What was given back first; None where the gate lets nothing fresh start."""
        if self._returned:
            self._leased += 1
            return self._returned.popleft()
        if self._training is not None and self.in_flight >= self._training.credits:
            return None
        self._leased += 1
        self.ledger.accepted += 1
        return self._fresh()

    def give_back(self, task: Task) -> None:
        self._leased -= 1
        self._returned.append(task)

    def complete(self, task: Task) -> None:
        self._leased -= 1
        if self._training is None:
            self.ledger.delivered += 1
        else:
            self._experience.append(task)

    def begin_step(self) -> float | None:
        """Seconds of the training step that begins now; None while one runs or a batch is not full."""
        if self._training is None or self._batch:
            return None
        while self._experience and len(self._fit) < self._training.batch_groups:
            self._judge(self._experience.popleft(), self._training.staleness)
        if len(self._fit) < self._training.batch_groups:
            return None
        self._batch, self._fit = self._fit, []
        return self._training.step_s

    def end_step(self) -> None:
        """The batch is trained; there is a new version."""
        self.ledger.trained += len(self._batch)
        self._batch = []
        self.version += 1

    def _judge(self, task: Task, rules: StalenessConfig) -> None:
        if is_stale([sample.version or 0 for sample in task.samples], self.version, rules):
            self.ledger.stale += 1
        else:
            self._fit.append(task)

    def _fresh(self) -> Task:
        task = Task(self._source.randint(*self._shape.prompt_tokens))
        tokens = self._source.randint(*self._shape.tokens)
        task.samples = [Rollout(task, tokens) for _ in range(self._shape.group)]
        return task


def is_stale(versions_G: Sequence[int], version: int, rules: StalenessConfig) -> bool:
    """Whether the trainer at `version` would drop a group whose samples have these oldest versions."""
    samples = len(versions_G)
    group = Group(  # as little of the record as staleness looks at
        samples_G=tuple(_sample(oldest) for oldest in versions_G),
        rewards_G=(0.0,) * samples,
        breakdown_G=({},) * samples,
        replica="",
        timings=Timings(0.0, 0.0, 0.0),
    )
    fewest = min(rules.min_group_samples, samples)
    return judge(group, current_version=version, max_age=rules.max_age, min_group_samples=fewest).stale


def _sample(version: int) -> Sample:
    span = (VersionSpan(version, 0, 1),)
    return Sample((Segment(_TOKEN, _TOKEN, _LOGPROB, span, _TRAINED, FinishReason.LENGTH),), text="")
