"""Putting weights into a running engine, and asking the engine what it computes with them."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import structlog

from rollout.errors import NightshiftError
from rollout.weights import Canary, WeightManifest
from services.tensor_shapes import Shapes, misshapen

_log = structlog.get_logger(__name__)

_COURTESY_S = 0.5
"""For users' first tokens before generation stands still."""
_CANARY_COURTESY_S = 0.2
"""For them before each of the canary's sequences: a step that computes one is longer by as much as a first token is."""
_CROWD_S = 5.0
"""For a crowd of users to pass: an engine whose users leave rollouts no seat has no use for weights, and near its
capacity each moment that they cost is felt by all who come meanwhile. Others wait for what this replica has."""
NO_GAP = 1e9
"""Stands for a gap that is not a finite number, or not known."""


Spare = Callable[[], AbstractContextManager[None]]
"""Within it rollouts leave the engine a seat: vLLM takes none from what runs."""


class EngineBroken(NightshiftError, RuntimeError):
    """The engine is paused with weights that cannot be used; only a restart helps."""


class Engine(Protocol):
    """What a swap needs of an engine."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None:
        """Load a directory beside the weights in use, while generation goes on, so that its `reload` takes no time.
        What is not done within the time, or cannot be done so, is done there. Begun in vain where it is no longer
        `wanted`."""
        ...

    async def first_tokens(self, *, within_s: float) -> None:
        """Returns when no user waits for a first token, or so many seconds later."""
        ...

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None:
        """Returns when users are no crowd, so many seconds later, or when it is no longer `wanted`."""
        ...

    async def put_back(self) -> None:
        """Undo whatever `prepare` and `reload` have made beside the engine's own model, for `reload` to load into that
        one."""
        ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None: ...

    async def set_version(self, version: int) -> None: ...

    @property
    def max_scored_tokens(self) -> int:
        """Length of the longest sequence that `score` takes."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why an engine did not answer a canary."""

    reason: str
    late: bool = False
    """It took too long, as it does where users leave no seat."""

    def __str__(self) -> str:
        return self.reason


class Weights(Protocol):
    """How new versions get into an engine."""

    @property
    def broken(self) -> str:
        """Why the engine must be replaced; empty while it is well."""
        ...

    @property
    def unscored(self) -> Unscored | None:
        """Why the engine did not answer the last canary; None when it did."""
        ...

    def refusal(self, manifest: WeightManifest) -> str:
        """Why the engine cannot load this version; empty when it can."""
        ...

    async def prepare(self, directory: Path, *, wanted: Callable[[], bool]) -> None:
        """What can be done of its `load` while generation goes on, for as long as it is `wanted`."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether nothing is done for weights that are there, until a crowd of users has passed."""
        ...

    async def load(self, directory: Path, *, version: int, fallback: Path | None = None) -> float:
        """Returns how long generation stood still, in seconds. Raises EngineBroken."""
        ...

    async def gap(self, canary: Canary) -> float:
        """Of what was loaded last, or is in use, to what it should compute, nats."""
        ...

    def conclude(self, *, verified: bool) -> bool:
        """The version that was loaded passed its check or not; whether what rollouts run on now can be trusted."""
        ...


class WeightSwap:
    """prepare, then pause(keep) -> reload -> label -> resume within a watchdog; one at a time."""

    def __init__(
        self,
        engine: Engine,
        *,
        watchdog_s: float,
        aside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        spare: Spare = nullcontext,
        ahead: bool = True,
        refresh_tied_head: bool = True,
        model: Path | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """`model` is what the engine was started with, and `shapes` those of its tensors. With `ahead` there is
        something to `prepare`. Within `aside` the engine works on no rollout: their tokens are to be of the weights
        that they say, from the first one computed to the last, while users' requests go on with what was computed
        of them. Within `spare` it has a seat for a check."""
        self._engine = engine
        self._aside = aside
        self._spare = spare
        self._watchdog_s = watchdog_s
        self._ahead = ahead
        self._refresh_tied_head = refresh_tied_head
        self._model = model
        self._shapes = shapes or {}
        self._unloaded = ""
        """Why the engine has its first model's weights in the place of what was loaded last; empty where it has not."""
        self.broken = ""
        """Why the engine must be replaced; empty while it is well."""
        self.unscored: Unscored | None = None
        """Why the engine did not answer the last canary; None when it did."""
        self.preparing = False
        """Whether the engine's steps take longer for weights to come."""
        self.waiting = False
        """Whether nothing is done for weights that are there, until a crowd of users has passed."""
        self.still_until = 0.0
        """When the last load ended, monotonic; infinite while generation stands still for one."""

    @property
    def max_scored_tokens(self) -> int:
        """Canaries are compared up to this length."""
        return self._engine.max_scored_tokens

    def refusal(self, manifest: WeightManifest) -> str:
        if manifest.adapter is None:
            return misshapen(manifest, self._shapes)
        return (
            f"version {manifest.version} is a LoRA adapter of rank {manifest.adapter.rank} alone"
            " (train.lora.publish=adapter), but this fleet's sharing.mode takes whole weights; use publish=merged, or"
            " sharing.mode=adapter"
        )

    async def prepare(self, directory: Path, *, wanted: Callable[[], bool] = lambda: True) -> None:
        """Then a crowd of users is left to pass, if it does so before long. Without a second copy `load` does all of it
        in the pause, which is sooner over where nobody generates."""
        if self.broken:
            return
        if self._ahead:
            await self._prepare(directory, wanted)
        self.waiting = True
        try:
            await self._engine.uncrowded(within_s=_CROWD_S, wanted=wanted)
        finally:
            self.waiting = False

    async def _prepare(self, directory: Path, wanted: Callable[[], bool]) -> None:
        self.preparing = True
        try:
            await self._engine.prepare(
                directory, refresh_tied_head=self._refresh_tied_head, within_s=self._watchdog_s, wanted=wanted
            )
        except Exception as error:
            _log.warning("not_prepared", directory=str(directory), error=repr(error))
        finally:
            self.preparing = False

    async def give_up_ahead(self) -> bool:
        """Prepare nothing from now on; whether anything was before."""
        if not self._ahead or self.broken:
            return False
        self._ahead = False
        await self._engine.put_back()
        return True

    async def load(self, directory: Path, *, version: int, fallback: Path | None = None) -> float:
        """Load a directory, or `fallback` where that fails; returns how long generation stood still, in seconds.

        Where neither loads, the engine gets back what it was started with, so that users are served, and `gap` is
        NO_GAP. Raises EngineBroken, and sets `broken`, when that fails too or the watchdog runs out. A load that takes
        too long is not cancelled: nothing may come between the workers and their reply.
        """
        if self.broken:
            raise EngineBroken(self.broken)
        # to stand still while somebody waits for a first token is what users feel most
        await self._engine.first_tokens(within_s=_COURTESY_S)
        async with self._aside():
            started, self.still_until = time.monotonic(), math.inf
            loading = asyncio.create_task(self._load(directory, version, fallback))
            try:
                done, _ = await asyncio.wait({loading}, timeout=self._watchdog_s)
            finally:
                self.still_until = time.monotonic()
        if not done:
            self.give_up(f"generation stood still for more than push.watchdog_s={self._watchdog_s}")
        if error := loading.exception():
            self.give_up(f"no usable weights: {error!r}")
        return self.still_until - started

    async def gap(self, canary: Canary) -> float:
        """Mean absolute difference between what the engine computes and what it should, in nats.

        NO_GAP when the engine fails to answer, or does not within the watchdog's time: what cannot be checked is not
        verified, and no reason to end a replica that serves users.
        """
        if self._unloaded:
            self.unscored = Unscored(self._unloaded)
            return NO_GAP
        gap, self.unscored = await canary_gap(
            canary, self._score, longest=self.max_scored_tokens, watchdog_s=self._watchdog_s, spare=self._spare
        )
        return gap

    async def _score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        await self._engine.first_tokens(within_s=_CANARY_COURTESY_S)
        return await self._engine.score(token_ids)

    def conclude(self, *, verified: bool) -> bool:
        """What was loaded is what rollouts run on."""
        return verified

    def give_up(self, reason: str) -> NoReturn:
        """The engine holds weights that nobody may have. Raises EngineBroken."""
        self.broken = reason
        raise EngineBroken(reason)

    async def scores(self, token_ids: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """What the engine computes for each sequence, as `Canary.logprobs`."""
        return await _scores(token_ids, self._engine.score)

    async def _load(self, directory: Path, version: int, fallback: Path | None) -> None:
        await self._engine.pause()
        loaded, error = await self._first_that_loads(
            list(dict.fromkeys(way for way in (directory, fallback, self._model) if way is not None))
        )
        own = loaded not in (directory, fallback)
        self._unloaded = f"it could not be loaded: {error!r}" if own else ""
        await self._engine.set_version(0 if own else version)
        await self._engine.resume()

    async def _first_that_loads(self, ways: Sequence[Path]) -> tuple[Path, Exception | None]:
        """And what the one before it raised. A half-done reload leaves layers without storage, so the engine stays
        paused until one succeeds. Raises what the last of them raised."""
        met: Exception | None = None
        for directory in ways[:-1]:
            try:
                await self._engine.reload(directory, refresh_tied_head=self._refresh_tied_head)
            except Exception as error:
                _log.warning("reload_failed", directory=str(directory), error=repr(error))
                met = error
            else:
                return directory, met
        await self._engine.reload(ways[-1], refresh_tied_head=self._refresh_tied_head)
        return ways[-1], met


async def canary_gap(
    canary: Canary,
    score: Callable[[Sequence[int]], Awaitable[tuple[float, ...]]],
    *,
    longest: int,
    watchdog_s: float,
    spare: Spare = nullcontext,
) -> tuple[float, Unscored | None]:
    """The gap, and why the engine did not answer (NO_GAP then); sequences are compared up to `longest` tokens."""
    # the trainer does not know how long a context its engines have
    canary = cut(canary, longest)
    scoring = asyncio.create_task(_scores(canary.token_ids, score))
    try:
        # not `timeout`: that would wait for the end of a cancellation, which an engine that hangs may never reach
        with spare():
            done, _ = await asyncio.wait({scoring}, timeout=watchdog_s)
    finally:
        scoring.cancel()
    unscored = None
    if not done:
        unscored = Unscored(f"no answer within push.watchdog_s={watchdog_s}", late=True)
    elif error := scoring.exception():
        unscored = Unscored(repr(error))
    if unscored is not None:
        _log.error("canary_failed", error=unscored.reason)
        return NO_GAP, unscored
    return mean_gap(scoring.result(), canary.logprobs), None


async def _scores(
    token_ids: Sequence[Sequence[int]], score: Callable[[Sequence[int]], Awaitable[tuple[float, ...]]]
) -> tuple[tuple[float, ...], ...]:
    # one by one: users who waited for the load meet the steps that compute them
    return tuple([await score(ids) for ids in token_ids])


def cut(canary: Canary, longest: int) -> Canary:
    """The first `longest` tokens of each sequence: a logprob depends on the tokens before it alone.

    >>> cut(Canary(((7, 8, 9), (7, 8)), ((-1.0, -2.0), (-3.0,))), 2)
    Canary(token_ids=((7, 8), (7, 8)), logprobs=((-1.0,), (-3.0,)))
    """
    pairs = [
        (ids[:longest], logprobs[: longest - 1]) if len(ids) > longest else (ids, logprobs)
        for ids, logprobs in zip(canary.token_ids, canary.logprobs, strict=True)
    ]
    return Canary(tuple(ids for ids, _ in pairs), tuple(logprobs for _, logprobs in pairs))


def mean_gap(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; NO_GAP when lengths differ, nothing is there or it is not finite.

    >>> mean_gap([[-1.0, -2.0]], [[-1.0, -2.5]])
    0.25
    """
    if [len(f) for f in found] != [len(e) for e in expected]:
        return NO_GAP
    gaps = [abs(f - e) for fs, es in zip(found, expected, strict=True) for f, e in zip(fs, es, strict=True)]
    gap = sum(gaps) / len(gaps) if gaps else math.nan
    return gap if math.isfinite(gap) else NO_GAP
