"""An engine, step by step: who gets a token, and how long that takes."""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from deploy.simulation.engine_model import EngineModel
from services.first_token_turns import FirstTokenTurns
from services.step_room import StepRoom

_NORMAL = NormalDist()
_STRATA, _LEAST = 16, 1e-6


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt with its answer; sizes in tokens."""

    prompt: int
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
    aside: set[Sequence]
    """Rollouts that sit it out."""


class Engine:
    """Runs steps as long as there is work; the caller says when each ends."""

    def __init__(
        self,
        model: EngineModel,
        *,
        most_tokens: int,
        most_of_one: int = 0,
        first_token_steps: int = 0,
        room: StepRoom,
        adapters: bool = False,
        seed: int,
    ) -> None:
        """`most_tokens` of one step; `most_of_one` prompt tokens of a sequence in it, 0 for no bound, as vLLM's
        `long_prefill_token_threshold`; `first_token_steps` in a row without rollouts while users' prompts are
        computed; `room` is that of any other for rollouts beside users; with `adapters` they are on one."""
        self._model = model
        self._beside_adapters = model.adapter_slowness if adapters else 1.0
        self._most_tokens = most_tokens
        self._most_of_one = most_of_one
        self._turns = FirstTokenTurns(most=first_token_steps)
        self._room = room
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
        aside = self._aside()
        users, rollouts, of_users, of_rollouts = self._sorted(aside)
        prefill = self._prefill([*of_users, *of_rollouts], users + rollouts)
        slowness *= self._beside_adapters if rollouts or of_rollouts else 1.0
        seconds = self._model.step_s(rollouts, users, prefill=sum(prefill.values())) * self._drift(now) * slowness
        self._step = _Step(now + seconds, now, prefill, aside)

    def end(self) -> tuple[Collection[Sequence], float]:
        """End the step: every sequence that got a token, and the step's seconds; none where no step ran."""
        step, self._step = self._step, None
        if step is None:
            return (), 0.0
        found = []
        for sequence in self.running:
            if sequence in step.aside:
                continue
            if sequence.fresh:
                sequence.fresh -= min(sequence.fresh, step.prefill.get(sequence, 0))
                if sequence.fresh:
                    continue
            sequence.left -= 1
            sequence.made += 1
            found.append(sequence)
        self.generated += len(found)
        return found, step.ends_at - step.began_at

    def _aside(self) -> set[Sequence]:
        """Rollouts that the next step is without; the oldest come first."""
        users = [sequence for sequence in self.running if sequence.user]
        rollouts = [sequence for sequence in self.running if not sequence.user]
        if self._turns.next(awaited=any(sequence.fresh for sequence in users)):
            return set(rollouts)
        room = self._room.rollouts(len(users))
        return set() if room is None else set(rollouts[room:])

    def _sorted(self, aside: Collection[Sequence]) -> tuple[int, int, list[Sequence], list[Sequence]]:
        """How many users and rollouts have a token in a step, and whose prompts are to be computed."""
        users = rollouts = 0
        of_users, of_rollouts = list[Sequence](), list[Sequence]()
        for sequence in self.running:
            if sequence in aside:
                continue
            if sequence.fresh:
                (of_users if sequence.user else of_rollouts).append(sequence)
            elif sequence.user:
                users += 1
            else:
                rollouts += 1
        return users, rollouts, of_users, of_rollouts

    def _prefill(self, prompts: Iterable[Sequence], decoding: int) -> dict[Sequence, int]:
        """One after the other, within the tokens of one step that those who are decoded leave."""
        budget = max(0, self._most_tokens - decoding)
        longest = self._most_of_one if self._most_of_one and len(self.running) > 1 else budget
        parts: dict[Sequence, int] = {}
        for sequence in prompts:
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
