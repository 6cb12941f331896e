"""An engine, step by step: who gets a token, and how long that takes."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from deploy.simulation.engine_model import EngineModel
from services.first_token_turns import FirstTokenTurns

_NORMAL = NormalDist()
_STRATA, _LEAST = 16, 1e-6


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt with its answer; sizes in tokens."""

    size: int
    """Prompt and answer so far."""
    left: int
    """Still to be generated."""
    fresh: int
    """To be computed before the next token."""
    user: bool
    made: int = 0


@dataclass(slots=True)
class _Step:
    ends_at: float
    began_at: float
    prefill: dict[Sequence, int]
    """Tokens of prompts that it computes."""
    alone: bool
    """Without rollouts."""


class Engine:
    """Runs steps as long as there is work; the caller says when each ends."""

    def __init__(
        self,
        model: EngineModel,
        *,
        most_tokens: int,
        most_of_one: int = 0,
        first_token_steps: int = 0,
        adapters: bool = False,
        seed: int,
    ) -> None:
        """`most_tokens` of one step; `most_of_one` prompt tokens of a sequence in it, 0 for no bound, as vLLM's
        `long_prefill_token_threshold`; `first_token_steps` in a row without rollouts while users' prompts are
        computed; with `adapters` rollouts are on one."""
        self._model = model
        self._beside_adapters = model.adapter_slowness if adapters else 1.0
        self._most_tokens = most_tokens
        self._most_of_one = most_of_one
        self._turns = FirstTokenTurns(most=first_token_steps)
        self._source = random.Random(seed)
        self._drifted, self._drifts_at = 1.0, 0.0
        self._strata: list[int] = []
        self._step: _Step | None = None
        self.running: list[Sequence] = []
        self.generated = 0

    @property
    def ends_at(self) -> float | None:
        """When the step that runs ends; None between two."""
        return self._step.ends_at if self._step else None

    def begin(self, now: float, *, slowness: float = 1.0) -> None:
        """Start a step with what is running, which takes `slowness` times as long; nothing without work."""
        if not self.running:
            return
        alone = self._turns.next(awaited=any(sequence.user and sequence.fresh for sequence in self.running))
        working = [sequence for sequence in self.running if sequence.user or not alone]
        prefill = self._prefill(working)
        users, rollouts = (
            sum(1 for sequence in working if not sequence.fresh and sequence.user is user) for user in (True, False)
        )
        slowness *= self._beside_adapters if any(not sequence.user for sequence in working) else 1.0
        seconds = self._model.step_s(rollouts, users, prefill=sum(prefill.values())) * self._drift(now) * slowness
        self._step = _Step(now + seconds, now, prefill, alone)

    def end(self) -> Iterator[tuple[Sequence, float]]:
        """End the step: every sequence that got a token, and the step's seconds. Those removed meanwhile get none."""
        step, self._step = self._step, None
        if step is None:
            return
        seconds = step.ends_at - step.began_at
        for sequence in list(self.running):
            if step.alone and not sequence.user:
                continue
            if sequence.fresh:
                sequence.fresh -= min(sequence.fresh, step.prefill.get(sequence, 0))
                if sequence.fresh:
                    continue
            sequence.size += 1
            sequence.left -= 1
            sequence.made += 1
            self.generated += 1
            yield sequence, seconds

    def _prefill(self, working: Iterable[Sequence]) -> dict[Sequence, int]:
        """Users' prompts first, within the tokens of one step."""
        budget = max(0, self._most_tokens - sum(1 for sequence in working if not sequence.fresh))
        longest = self._most_of_one if self._most_of_one and len(self.running) > 1 else budget
        parts: dict[Sequence, int] = {}
        for sequence in sorted((s for s in working if s.fresh), key=lambda s: not s.user):
            parts[sequence] = min(sequence.fresh, longest, budget)
            budget -= parts[sequence]
        return parts

    def _deviation(self) -> float:
        """Normally distributed, stratified: a time of so many draws has fast and slow ones as they are to be expected,
        and what is simulated for minutes is not at the mercy of a few."""
        if not self._strata:
            self._strata = self._source.sample(range(_STRATA), _STRATA)
        share = (self._strata.pop() + self._source.random()) / _STRATA
        return _NORMAL.inv_cdf(min(1 - _LEAST, max(_LEAST, share)))

    def _drift(self, now: float) -> float:
        if now >= self._drifts_at:
            self._drifted = math.exp(self._model.drift * self._deviation())
            self._drifts_at = now + self._model.drift_s
        return self._drifted
