"""One sample of a leased group: it takes a seat, generates, gives the seat up to a user, and goes on where it was.

line -> seat -> engine -> finished
  ^              |
  +--- cut <-----+    the tokens so far stay; one that is held back waits before the line
"""

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollout.board import CutCause
from rollout.errors import NightshiftError
from rollout.queue import Lease
from rollout.salvage import Chunk, Salvaged, after, joined, tokens
from rollout.types import Partial, Sampling
from services.kept_prefixes import KeptPrefixes
from services.seats import Seats, Ticket

_LOOK_S = 0.005
"""Between two looks whether a sample has its first token."""
_ORIGINS_PER_ATTEMPT = 16
"""Bits. A sample that starts anew within an attempt begins another history."""


class EngineGone(NightshiftError, RuntimeError):
    """The engine ended before a sample had begun on it."""


class Generation(Protocol):
    """One request in the engine."""

    async def ended(self) -> Partial | None:
        """Its tokens when it is finished or cut; None when it was cut before the first. Cancelling aborts it."""
        ...

    @property
    def size(self) -> int:
        """How many tokens it has now; once it has ended, no fewer than it was last seen to have."""
        ...

    @property
    def reused(self) -> int:
        """Tokens that it was given and the engine had in its prefix cache; known when it has ended, 0 before."""
        ...

    def so_far(self, start: int = 0) -> Partial | None:
        """Its tokens from `start` on, now; None without any, and once it has ended well."""
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

    def cached_prefix(self, size: int) -> int:
        """Tokens of a prompt of `size` that are not computed again while another sequence with it is generated."""
        ...

    @property
    def dead(self) -> bool:
        """Whether it has ended for good."""
        ...

    @property
    def loads(self) -> int:
        """How often other weights came into it."""
        ...

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, since: int | None = None
    ) -> Generation:
        """What was computed of the prompt by requests begun `since` so many loads is used; None: of as many as there
        are."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens skipped."""
        ...


@dataclass(slots=True)
class Tally:
    """Response tokens of one replica's rollouts since its start."""

    generated: int = 0
    """By the engine, as far as they were seen here."""
    cut_causes: Counter[CutCause] = field(default_factory=Counter)
    """Times that a sample had to leave the engine before its end, by what for."""
    preempted: int = 0
    """That samples had when that happened."""
    salvaged: int = 0
    """That samples went on from: of an earlier attempt, here or elsewhere, or from before a cut. Those of a sample that
    an earlier attempt ended, when its group is scored."""
    prefilled_again: int = 0
    """Prompt and response tokens that the engine computed once more to go on from those; not what its prefix cache
    had."""
    lost: int = 0
    """That samples had here, of an earlier attempt too, and that went nowhere: neither handed in nor salvaged."""

    @property
    def cuts(self) -> int:
        """Times that a sample had to leave the engine before its end."""
        return self.cut_causes.total()

    @property
    def figures(self) -> dict[str, Any]:
        """Those of a heartbeat, but `generated`, to which it adds what is in flight."""
        return {
            "rollout_cuts": self.cuts,
            "rollout_cut_causes": {cause.value: count for cause, count in self.cut_causes.items()},
            "rollout_preempted": self.preempted,
            "rollout_salvaged": self.salvaged,
            "rollout_prefilled_again": self.prefilled_again,
            "rollout_lost": self.lost,
        }

    def cut(self, cause: CutCause, size: int) -> None:
        """A sample of so many tokens had to."""
        self.cut_causes[cause] += 1
        self.preempted += size


class SampleRun:
    """`kept` is what there is of it besides what its engine request holds."""

    def __init__(
        self,
        engine: Generator,
        seats: Seats,
        lease: Lease,
        index: int,
        *,
        prefixes: KeptPrefixes,
        salvaged: Salvaged | None,
        worth: Callable[[Partial], bool],
        tally: Tally,
    ) -> None:
        """Stands in the line at once, so that the next look at free seats sees it, unless `salvaged` is all of it.

        `worth` says whether a part is worth going on from; it is asked whenever the sample sits down.
        """
        start = salvaged if salvaged is not None and worth(salvaged.part) else None
        self._refused = 0 if salvaged is None or start is not None else tokens(salvaged.part)
        """Tokens that the queue has, until there are others in their place."""
        self._engine = engine
        self._seats = seats
        self._request = lease.request
        self._group = lease.group_id
        self._index = index
        self._prefixes = prefixes
        self._origins = itertools.count(lease.attempt << _ORIGINS_PER_ATTEMPT)
        self._origin = next(self._origins) if start is None else start.origin
        self._worth = worth
        self._tally = tally
        self._generation: Generation | None = None
        self._parting = False
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self.kept = None if start is None else start.part
        self._saved = tokens(self.kept)
        self.text = ""
        self._ticket = None if self.finished else self._ask()
        self._not_taken_up = tokens(self.kept)
        """Of `kept`, tokens that it has not gone on from yet."""

    @property
    def finished(self) -> bool:
        return self.kept is not None and self.kept.finished

    @property
    def seated(self) -> bool:
        """Whether the engine works on it."""
        return self._generation is not None

    @property
    def held_back(self) -> bool:
        return not self._may_go_on.is_set()

    @property
    def in_flight(self) -> int:
        """How many tokens its request in the engine has."""
        return self._generation.size if self._generation else 0

    @property
    def computed(self) -> int:
        """Tokens, of the prompt too, that another engine would compute again; 0 while this one does not work on it."""
        return self._size() + self.in_flight if self.seated else 0

    @property
    def tokens(self) -> int:
        """That it has."""
        return tokens(self.kept) + self.in_flight

    @property
    def saved_tokens(self) -> int:
        """That the queue has of it."""
        return self._saved

    @property
    def unsaved(self) -> int:
        """Tokens that it has and the queue does not."""
        return max(0, tokens(self.kept) + self.in_flight - self._saved)

    def chunk(self) -> Chunk | None:
        """What the queue does not have of it; None where that is nothing."""
        waiting = None if self.kept is None else after(self.kept, self._saved)
        running = self._generation.so_far(max(0, self._saved - tokens(self.kept))) if self._generation else None
        fresh = joined(waiting, running)
        return None if fresh is None else Chunk(self._index, self._origin, self._saved, fresh)

    def saved(self, chunk: Chunk) -> None:
        """The queue has it."""
        if chunk.origin == self._origin:
            self._saved = max(self._saved, chunk.start + tokens(chunk.part))

    async def run(self) -> None:
        """Until it is finished, or `part` was called. Raises EngineGone and what the engine raises."""
        while (ticket := self._ticket) is not None:
            try:
                await asyncio.wait({ticket.seated, ticket.wanted}, return_when=asyncio.FIRST_COMPLETED)
                if not ticket.wanted.done():
                    await self._sit(ticket)
            finally:
                self._seats.leave(ticket)
                self._ticket = None
            if not (self.finished or self._parting):
                await self._may_go_on.wait()
            if not (self.finished or self._parting):
                self._ticket = self._ask(ticket)
        if self.kept is not None and self.finished:
            self.text = self._engine.decode(self.kept.token_ids)

    def part(self) -> None:
        """End at once, with what there is."""
        self._parting = True
        self._may_go_on.set()
        if self._ticket is not None:
            self._ticket.want()

    def hold_back(self) -> None:
        """Leave the engine, with what there is, and stand in no line until `let_on`."""
        if self.seated and self._ticket is not None and not self._parting:
            self._may_go_on.clear()
            self._ticket.want(CutCause.PUSH)

    def let_on(self) -> None:
        """Go on, at the place in the line that its age gives it."""
        self._may_go_on.set()

    def take_up(self) -> None:
        """It has gone on from what there was of it, or that was all of it and is handed in."""
        self._tally.salvaged += self._not_taken_up
        self._not_taken_up = 0

    def abandon(self) -> None:
        """It is about to be cancelled: its request takes what it has with it."""
        self._tally.generated += self.in_flight
        self._tally.lost += self.unsaved
        self._generation, self._saved = None, tokens(self.kept)

    def leave(self) -> None:
        """Give the seat or the place in the line back, whatever became of `run`."""
        if self._ticket is not None:
            self._seats.leave(self._ticket)

    def _ask(self, again: Ticket | None = None) -> Ticket:
        shared = self._engine.cached_prefix(len(self._request.prompt_ids))
        return self._seats.ask(prefill=self._size(), again=again, family=id(self._request), shared=shared)

    async def _sit(self, ticket: Ticket) -> None:
        """One stretch of tokens, to the end of the sample or until the seat is wanted."""
        if self._engine.dead:
            raise EngineGone("the engine ended before this sample began")
        if self.kept is not None and not self._worth(self.kept):
            self._start_anew()
        self._tally.lost, self._refused = self._tally.lost + self._refused, 0
        before = self.kept.token_ids if self.kept is not None else ()
        sampling = self._request.sampling
        self._generation = generation = self._engine.begin(
            self._request.prompt_ids + before,
            replace(sampling, max_tokens=sampling.max_tokens - len(before)),
            seed=sample_seed(sampling.seed, self._index, before),
            since=self._prefixes.since((self._group, self._index, self._origin), self._engine.loads),
        )
        watching = [
            asyncio.create_task(self._tell_start(ticket)),
            asyncio.create_task(_cut_when(ticket.wanted, generation)),
        ]
        try:
            self._take(await generation.ended(), generation.reused)
        except Exception:
            self._take(generation.so_far(), generation.reused)
            raise
        finally:
            self._generation = None
            for task in watching:
                task.cancel()
        if not self.finished and (cause := self._cut_cause(ticket)) is not None:
            self._tally.cut(cause, tokens(self.kept))

    def _cut_cause(self, ticket: Ticket) -> CutCause | None:
        """None where nobody asked for its seat and it was only to part."""
        # its adapter's place is asked of its request, not of the seat
        return CutCause.ADAPTER if not ticket.wanted.done() else ticket.cause

    async def _tell_start(self, ticket: Ticket) -> None:
        while not self.in_flight:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(_LOOK_S)
        self._seats.started(ticket)
        self.take_up()

    def _size(self) -> int:
        """Tokens that the engine computes before the next one."""
        return len(self._request.prompt_ids) + tokens(self.kept)

    def _take(self, stretch: Partial | None, reused: int) -> None:
        if self.seated:  # else it was abandoned, and is counted
            # of a request that failed nothing may be left, but who reads the tally has seen its tokens
            gone = max(0, self.in_flight - tokens(stretch))
            self._tally.generated += tokens(stretch) + gone
            self._tally.lost += min(gone, self.unsaved)  # the queue may have some of them
        if self.kept is not None and tokens(stretch):  # without a token it was cut before its turn
            self._tally.prefilled_again += self._size() - reused
            self.take_up()
        self.kept = joined(self.kept, stretch)
        self._not_taken_up += 0 if self.finished else tokens(stretch)

    def _start_anew(self) -> None:
        self._tally.lost += tokens(self.kept)
        self.kept, self._saved, self._not_taken_up, self._origin = None, 0, 0, next(self._origins)


async def _cut_when(wanted: asyncio.Future[None], generation: Generation) -> None:
    await asyncio.shield(wanted)
    await generation.cut()


def sample_seed(seed: int | None, index: int, before: Sequence[int] = ()) -> int | None:
    """Of one sample of a seeded group that goes on after the tokens `before`; far apart for neighbours, since an
    engine's seed starts its stream of random numbers anew. None stays None."""
    if seed is None:
        return None
    name = f"{seed}:{index}" + "".join(f":{token}" for token in before)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
