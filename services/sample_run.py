"""One sample of a leased group: it takes a seat, generates, gives the seat up when a user needs it, and goes on where it was.

    line -> seat -> engine -> finished
      ^              |
      +--- cut <-----+    the tokens so far stay
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rollout.errors import NightshiftError
from rollout.types import Partial, RolloutRequest, Sampling
from services.partials import joined
from services.seats import Seats, Ticket


class EngineGone(NightshiftError, RuntimeError):
    """The engine ended before a sample had begun on it."""


class Generation(Protocol):
    """One request in the engine."""

    async def ended(self) -> Partial | None:
        """Its tokens when it is finished or cut; None when it was cut before the first. Cancelling aborts it."""
        ...

    @property
    def size(self) -> int:
        """How many tokens it has now."""
        ...

    def so_far(self) -> Partial | None:
        """Its tokens now."""
        ...

    async def cut(self) -> None:
        """End it now, with the tokens that it has."""
        ...


class Generator(Protocol):
    """What a sample needs of an engine."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dead(self) -> bool:
        """Whether it has ended for good."""
        ...

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None) -> Generation: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens skipped."""
        ...


@dataclass(slots=True)
class Tally:
    """Response tokens of one replica's rollouts since its start."""

    generated: int = 0
    """By the engine, and kept at least until their group ended."""
    cuts: int = 0
    """Samples that gave their seat to a user, a count."""
    salvaged: int = 0
    """Taken over from an earlier attempt, here or elsewhere, or from before a cut."""
    prefilled_again: int = 0
    """Prompt and response tokens computed once more to go on from a salvage."""
    lost: int = 0
    """Generated here and neither handed in nor salvaged."""


class SampleRun:
    """`kept` is what there is of it besides what its engine request holds."""

    def __init__(
        self,
        engine: Generator,
        seats: Seats,
        request: RolloutRequest,
        index: int,
        *,
        start: Partial | None,
        tally: Tally,
    ) -> None:
        """Stands in the line at once, so that the next look at free seats sees it, unless `start` is finished."""
        self._engine = engine
        self._seats = seats
        self._request = request
        self._index = index
        self._tally = tally
        self._generation: Generation | None = None
        self._ticket = None if start is not None and start.finished else seats.ask()
        self.kept = start
        tally.salvaged += tokens(start)

    @property
    def seated(self) -> bool:
        return self._generation is not None

    @property
    def finished(self) -> bool:
        return self.kept is not None and self.kept.finished

    @property
    def in_flight(self) -> int:
        """How many tokens its running request has."""
        return self._generation.size if self._generation else 0

    @property
    def size(self) -> int:
        """How many tokens it has now."""
        return tokens(self.kept) + self.in_flight

    def so_far(self) -> Partial | None:
        """All of its tokens now, those of a running request included."""
        return joined(self.kept, self._generation.so_far() if self._generation else None)

    async def run(self) -> Partial:
        """The finished sample. Raises EngineGone and what the engine raises."""
        while (ticket := self._ticket) is not None:
            await ticket.seated
            if self._engine.dead:
                raise EngineGone("the engine ended before this sample began")
            try:
                await self._generate(ticket)
            finally:
                self._seats.leave(ticket)
            self._ticket = None if self.finished else self._seats.ask(first=True)
        assert self.kept is not None
        return self.kept

    def leave(self) -> None:
        """Give the seat or the place in the line back."""
        if self._ticket is not None:
            self._seats.leave(self._ticket)

    async def _generate(self, ticket: Ticket) -> None:
        """One stretch of tokens, to the end of the sample or until the seat is wanted."""
        before = self.kept.token_ids if self.kept is not None else ()
        if before:
            self._tally.prefilled_again += len(self._request.prompt_ids) + len(before)
        sampling = self._request.sampling
        self._generation = generation = self._engine.begin(
            self._request.prompt_ids + before,
            replace(sampling, max_tokens=sampling.max_tokens - len(before)),
            seed=sample_seed(sampling.seed, self._index, before),
        )
        cutting = asyncio.create_task(_cut_when(ticket.wanted, generation))
        try:
            part = await generation.ended()
        finally:
            self._generation = None
            cutting.cancel()
        self._tally.generated += tokens(part)
        self.kept = joined(self.kept, part)
        if part is None or not part.finished:
            self._tally.cuts += 1
            self._tally.salvaged += tokens(part)


async def _cut_when(wanted: asyncio.Future[None], generation: Generation) -> None:
    await asyncio.shield(wanted)
    await generation.cut()


def tokens(partial: Partial | None) -> int:
    return 0 if partial is None else len(partial.token_ids)


def sample_seed(seed: int | None, index: int, before: Sequence[int] = ()) -> int | None:
    """Of one sample of a seeded group that goes on after the tokens `before`; far apart for neighbours, since an
    engine's seed starts its stream of random numbers anew. None stays None."""
    if seed is None:
        return None
    name = f"{seed}:{index}" + "".join(f":{token}" for token in before)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
