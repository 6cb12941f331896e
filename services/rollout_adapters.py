"""Rollouts on an adapter of an engine whose users are on the base: versions come and go without a pause.

version -> place (cut who is in the way) -> load -> canary on the adapter -> new samples begin on it
                                                                     \\-> it leaves, the one in use stays
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from rollout.errors import WeightsError
from rollout.types import Partial, Sampling
from rollout.weights import Canary, WeightManifest
from services.adapters import Adapter, AdapterPlaces
from services.sample_run import Generation
from services.swap import EngineBroken, Spare, Unscored, canary_gap

_log = structlog.get_logger(__name__)


class AdapterEngine(Protocol):
    """What this needs of an engine."""

    @property
    def max_model_len(self) -> int: ...

    def cached_prefix(self, size: int) -> int: ...

    @property
    def max_scored_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dead(self) -> bool: ...

    @property
    def loads(self) -> int: ...

    def begin(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None,
        since: int | None = None,
        adapter: Adapter | None = None,
    ) -> Generation: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> tuple[float, ...]: ...

    async def load_adapter(self, adapter: Adapter) -> float:
        """Returns how long the engine stood still, in seconds."""
        ...

    async def unload_adapter(self, adapter: Adapter) -> None:
        """From all of its workers, those included that never had it."""
        ...

    async def adapter_layers(self) -> frozenset[str]:
        """Last parts of the names of the layers that an adapter can change."""
        ...


class RolloutAdapters:
    """The engine as rollouts see it (`sample_run.Generator`), and how new versions get into it (`swap.Weights`)."""

    def __init__(
        self,
        engine: AdapterEngine,
        *,
        places: int,
        first: int,
        max_rank: int,
        watchdog_s: float,
        spare: Spare = nullcontext,
    ) -> None:
        """`first` is the number of the first adapter; smaller ones are for users. Within `spare` the engine has a seat
        for a check."""
        self._engine = engine
        self._places = AdapterPlaces(places, first=first)
        self._max_rank = max_rank
        self._watchdog_s = watchdog_s
        self._spare = spare
        self._generations: dict[Adapter, set[Generation]] = defaultdict(set)
        self._fewer = asyncio.Event()
        """Requests or adapters."""
        self._unloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.layers: frozenset[str] = frozenset()
        """That the engine lets an adapter change; none before `start`."""
        self.broken = ""
        self.unscored: Unscored | None = None
        """Why the engine did not answer the last canary; None when it did."""
        self.preparing = self.waiting = False
        self.still_until = 0.0
        """When the last load ended, monotonic; infinite while the engine may stand still for one."""

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def cached_prefix(self, size: int) -> int:
        return self._engine.cached_prefix(size)

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def dead(self) -> bool:
        return self._engine.dead

    @property
    def loads(self) -> int:
        return self._engine.loads

    @property
    def max_scored_tokens(self) -> int:
        """Canaries are compared up to this length."""
        return self._engine.max_scored_tokens

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that have a place, the oldest first."""
        return self._places.adapters

    async def start(self) -> None:
        """Ask the engine what it can serve."""
        self.layers = await self._engine.adapter_layers()

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, since: int | None = None
    ) -> Generation:
        """On the current version, to the end of the request; on the model as loaded before there is one."""
        adapter = self._places.current
        generation = self._engine.begin(prompt_ids, sampling, seed=seed, since=since, adapter=adapter)
        if adapter is None:
            return generation
        adapter.requests += 1
        self._generations[adapter].add(generation)
        return _OnAdapter(generation, over=partial(self._over, adapter, generation))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)

    def refusal(self, manifest: WeightManifest) -> str:
        form = manifest.adapter
        if form is None:
            return (
                f"version {manifest.version} is whole weights, but this fleet has sharing.mode=adapter and takes LoRA"
                " adapters alone (train.lora.publish=adapter)"
            )
        if form.rank > self._max_rank:
            return (
                f"version {manifest.version} is an adapter of rank {form.rank} (train.lora.r), above"
                f" sharing.max_lora_rank={self._max_rank}"
            )
        if self.layers and (unserved := sorted(set(form.target_modules) - self.layers)):
            return (
                f"version {manifest.version} changes {', '.join(unserved)} (train.lora.target_modules), but this engine"
                f" serves adapters of {', '.join(sorted(self.layers))}"
            )
        return ""

    async def prepare(self, directory: Path, *, wanted: Callable[[], bool]) -> None:
        """Nothing: `load` is beside what is in use as it is."""

    async def load(self, directory: Path, *, version: int, fallback: Path | None = None) -> float:
        """Load a directory, or `fallback` where that fails; returns how long the engine stood still for it, in seconds.

        Raises WeightsError when neither loads or no place is left within the watchdog's time, and EngineBroken when the
        engine does not answer in it.
        """
        await self._make_room(version)
        try:
            return await self._load(directory, version)
        except WeightsError as error:
            if fallback is None or fallback == directory:
                raise
            _log.warning("adapter_not_loaded", directory=str(directory), error=str(error), fallback=str(fallback))
            await self._make_room(version)
            return await self._load(fallback, version)

    async def gap(self, canary: Canary) -> float:
        """Of the version that is being loaded, else of the one in use; see `swap.canary_gap`."""
        adapter = self._places.loading or self._places.current
        if adapter is None:
            raise WeightsError("no adapter is loaded, so there is none to check")

        async def score(token_ids: Sequence[int]) -> tuple[float, ...]:
            adapter.requests += 1
            try:
                return await self._engine.score(token_ids, adapter)
            finally:
                self._end(adapter)

        gap, self.unscored = await canary_gap(
            canary, score, longest=self.max_scored_tokens, watchdog_s=self._watchdog_s, spare=self._spare
        )
        return gap

    async def base_scores(self, token_ids: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """What the model as loaded computes for each sequence, as `Canary.logprobs`."""
        return tuple(await asyncio.gather(*(self._engine.score(ids) for ids in token_ids)))

    def conclude(self, *, verified: bool) -> bool:
        """Rollouts go on with what they have where the new version failed, and that was verified before."""
        if (adapter := self._places.loading) is not None:
            (self._places.promote if verified else self._places.drop)(adapter)
            self._unload_soon()
        return True

    async def _make_room(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._watchdog_s):
                await self._unload_idle()
                while self._places.full:
                    self._fewer.clear()
                    if (adapter := self._places.in_the_way) is not None:
                        await self._cut(adapter)
                    await self._fewer.wait()
                    await self._unload_idle()
        except TimeoutError:
            raise WeightsError(
                f"version {version} found no place among sharing.rollout_adapters within"
                f" push.watchdog_s={self._watchdog_s} s: {self._places.described}"
            ) from None

    async def _cut(self, adapter: Adapter) -> None:
        """Its samples go on with the current version."""
        generations = list(self._generations[adapter])
        _log.info("adapter_cut", version=adapter.version, samples=len(generations))
        await asyncio.gather(*(generation.cut() for generation in generations))

    async def _load(self, directory: Path, version: int) -> float:
        adapter = self._places.reserve(version, directory)
        loading = asyncio.ensure_future(self._engine.load_adapter(adapter))
        self.still_until = math.inf
        try:
            # what takes too long is not cancelled: nothing may come between the workers and their reply
            done, _ = await asyncio.wait({loading}, timeout=self._watchdog_s)
        finally:
            self.still_until = time.monotonic()
        if not done:
            self.broken = f"loading an adapter took more than push.watchdog_s={self._watchdog_s}"
            raise EngineBroken(self.broken)
        if error := loading.exception():
            self._places.drop(adapter)
            self._unload_soon()  # some of the engine's workers may have it
            raise WeightsError(f"{directory}: the engine cannot load the adapter of version {version}: {error!r}")
        return loading.result()

    def _over(self, adapter: Adapter, generation: Generation) -> None:
        self._generations[adapter].discard(generation)
        self._end(adapter)

    def _end(self, adapter: Adapter) -> None:
        adapter.requests -= 1
        self._fewer.set()
        if adapter in self._places.idle:
            self._unload_soon()

    def _unload_soon(self) -> None:
        task = asyncio.create_task(self._unload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload(self) -> None:
        try:
            await self._unload_idle()
        except Exception as error:  # tried again when the next version needs the place
            _log.warning("adapter_not_unloaded", error=repr(error))

    async def _unload_idle(self) -> None:
        async with self._unloading:
            for adapter in self._places.idle:
                await self._engine.unload_adapter(adapter)
                self._places.unloaded(adapter)
                self._generations.pop(adapter, None)
                self._fewer.set()


class _OnAdapter:
    """A generation that keeps its adapter in the engine until it has ended; see `sample_run.Generation`."""

    def __init__(self, generation: Generation, over: Callable[[], None]) -> None:
        self._generation = generation
        self._over = over

    @property
    def size(self) -> int:
        return self._generation.size

    @property
    def reused(self) -> int:
        return self._generation.reused

    async def ended(self) -> Partial | None:
        try:
            return await self._generation.ended()
        finally:
            self._over()

    def so_far(self, start: int = 0) -> Partial | None:
        return self._generation.so_far(start)

    async def cut(self) -> None:
        await self._generation.cut()
