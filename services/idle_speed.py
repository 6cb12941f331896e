"""How fast an engine is with nothing to do, and how much more all its seats do together; measured before users come."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from rollout.types import Sampling
from services.adapters import Adapter
from services.sample_run import Generation

PROBE_PROMPT = 24
"""Tokens of the prompts whose time to the first token is measured."""
_LONG_PROMPT, _RESPONSE = 256, 16
"""Tokens."""
_REPEATS, _TRIES = 3, 12
"""Sequences alone that are wanted, and the most that are begun for them: an end may be sampled at once."""
_FEWEST = _RESPONSE // 2
"""Tokens from which a pace is taken: of fewer, the first's own spread would be all of it."""
_SLOWED = 1.5
_SEED = 20_240

_log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What a measurement needs of an engine."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, adapter: Adapter | None = None
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class IdleSpeed:
    """Of one engine, seconds."""

    first_token_s: float
    token_s: float
    """Each further token."""
    capacity: float
    """Seconds of idle service that it does in a second with all seats busy: 1 where it gains nothing by batching, its
    seats where a full batch is as fast as a single sequence."""
    prefill_token_s: float = 0.0
    """What each further token of a prompt adds to the first token; 0 where none is to be seen."""

    def service_s(self, tokens: float) -> float:
        """Of one sequence alone.

        >>> IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=10.0).service_s(101)
        2.05
        """
        return self.first_token_s + max(0.0, tokens - 1) * self.token_s

    def prompt_s(self, prompt: float) -> float:
        """That the first token of a sequence with so many prompt tokens takes longer than the probe's.

        >>> round(IdleSpeed(0.05, 0.02, 10.0, prefill_token_s=0.001).prompt_s(1024), 6)
        1.0
        """
        return max(0.0, prompt - PROBE_PROMPT) * self.prefill_token_s

    def busy_s(self, tokens: float, prompt: float) -> float:
        """What a sequence takes of `capacity`: prompts are computed one after the other, however many seats there are.

        >>> round(IdleSpeed(0.05, 0.02, 10.0, prefill_token_s=0.001).busy_s(101, 124), 6)
        3.05
        """
        return self.service_s(tokens) + self.capacity * self.prompt_s(prompt)

    def full_step_s(self, seats: int) -> float:
        """Of a step with all `seats` busy.

        >>> IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=10.0).full_step_s(40)
        0.08
        """
        return self.token_s * seats / self.capacity

    def sequence_s(self, seats: int) -> float:
        """That one sequence more adds to a step, of an engine with so many `seats`.

        >>> round(IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0).sequence_s(33), 5)
        0.00195
        """
        return max(0.0, self.full_step_s(seats) - self.token_s) / max(1, seats - 1)


def slowed_by_company(idle: IdleSpeed, seats: int) -> bool:
    """Whether a step with all `seats` busy takes half as long again as that of one sequence.

    >>> [slowed_by_company(IdleSpeed(0.05, 0.02, capacity=capacity), 32) for capacity in (8.0, 30.0)]
    [True, False]
    """
    return idle.full_step_s(seats) > _SLOWED * idle.token_s


async def measure(engine: Engine, seats: int, *, adapter: Adapter | None, clock: Callable[[], float]) -> IdleSpeed:
    """On an engine that does nothing else; the fastest of a few tries, since all that disturbs one makes it slower.

    `adapter` is the one that users are on, None for the model itself. Costs a few short sequences and one batch of
    `seats`. Raises GenerationError.
    """
    timed = partial(_timed, engine, adapter=adapter, clock=clock)
    short, long = (min(size, engine.max_model_len // 2) for size in (PROBE_PROMPT, _LONG_PROMPT))
    prompts = _prompts(engine.vocab_size, short, 1 + _REPEATS + seats + _TRIES)
    await timed(prompts[:1], 2)  # what an engine does at its first request only
    firsts = [await timed([prompt], 1) for prompt in prompts[1 : _REPEATS + 1]]
    longs = [await timed([prompt], 1) for prompt in _prompts(engine.vocab_size, long, _REPEATS)]
    batch_s, batch_tokens = await timed(prompts[_REPEATS + 1 : _REPEATS + 1 + seats], _RESPONSE)
    first_s = min(seconds for seconds, _ in firsts)
    token_s = await _pace(timed, prompts[-_TRIES:], first_s)
    prefill_s = (min(seconds for seconds, _ in longs) - first_s) / max(1, long - short)
    service_s = seats * first_s + (batch_tokens - seats) * token_s
    capacity = min(float(seats), max(1.0, service_s / batch_s))
    return IdleSpeed(first_s, token_s, capacity, max(0.0, prefill_s))


async def _pace(
    timed: Callable[[Sequence[tuple[int, ...]], int], Awaitable[tuple[float, int]]],
    prompts: Sequence[tuple[int, ...]],
    first_s: float,
) -> float:
    """Seconds of each further token of a sequence alone; `first_s`, which is no less, where hardly any sequence has
    some."""
    paces: list[float] = []
    for prompt in prompts:
        seconds, tokens = await timed([prompt], _RESPONSE)
        if tokens >= _FEWEST:
            paces.append(max(0.0, seconds - first_s) / (tokens - 1))
        if len(paces) == _REPEATS:
            break
    if not paces:
        _log.warning("pace_not_measured", prompts=len(prompts), ended_before_tokens=_FEWEST, taken_s=first_s)
    return min(paces, default=first_s)


async def _timed(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    *,
    adapter: Adapter | None,
    clock: Callable[[], float],
) -> tuple[float, int]:
    """Seconds for all of them at once, and the tokens that came of it: an end may be sampled early."""
    sampling = Sampling(max_tokens=tokens)
    began = clock()
    parts = await asyncio.gather(
        *(engine.begin(prompt, sampling, seed=index, adapter=adapter).ended() for index, prompt in enumerate(prompts))
    )
    return clock() - began, sum(len(part.token_ids) for part in parts if part is not None)


def _prompts(vocab_size: int, length: int, count: int) -> list[tuple[int, ...]]:
    """Seeded and all different, so that none finds another's prefix in the cache."""
    numbers = random.Random(_SEED + length)
    return [tuple(numbers.randrange(vocab_size) for _ in range(length)) for _ in range(count)]
