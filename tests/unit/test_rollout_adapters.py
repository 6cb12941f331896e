"""Versions come into an engine as adapters and leave it when nobody needs them any more."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.errors import WeightsError
from rollout.types import FinishReason, Partial, Sampling, VersionSpan
from rollout.weights import AdapterForm, Canary, WeightManifest
from services.adapters import Adapter
from services.rollout_adapters import RolloutAdapters
from services.sample_run import Generation
from services.swap import NO_GAP, EngineBroken

ONE = Canary(((1, 2, 3),), ((-1.0, -1.0),))
LAYERS = frozenset({"q_proj", "v_proj"})


class Request:
    """Runs until it is ended by `finish` or cut."""

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self.size = 1
        self.reused = 0
        self._end = asyncio.get_running_loop().create_future()
        self.was_cut = False

    async def ended(self) -> Partial | None:
        await self._end
        version = self.adapter.version if self.adapter else 0
        reason = FinishReason.ABORT if self.was_cut else FinishReason.STOP
        return Partial((7,), (-1.0,), (VersionSpan(version, 0, 1),), reason)

    def so_far(self, start: int = 0) -> Partial | None:
        return None

    async def cut(self) -> None:
        self.was_cut = True
        self.finish()

    def finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)


class Engine:
    """Has places like vLLM's, and dies where it would unload an adapter that is in use."""

    max_model_len, max_scored_tokens, vocab_size, dead, loads = 64, 63, 100, False, 0

    def cached_prefix(self, size: int) -> int:
        return size // 4 * 4

    def __init__(self) -> None:
        self.loaded: dict[int, Adapter] = {}
        self.requests: list[Request] = []
        self.bad: set[Path] = set()
        self.hangs = False
        self.logprob = -1.0
        self.moved = 0.0
        """What an adapter adds to it."""
        self.fault: Exception | None = None
        """Met by whatever is computed with an adapter."""

    def begin(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None,
        since: int | None = None,
        adapter: Adapter | None = None,
    ) -> Generation:
        assert adapter is None or adapter.number in self.loaded
        self.requests.append(Request(adapter))
        return self.requests[-1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> tuple[float, ...]:
        assert adapter is None or adapter.number in self.loaded
        if adapter is not None and self.fault is not None:
            raise self.fault
        return (self.logprob + (self.moved if adapter else 0.0),) * (len(token_ids) - 1)

    async def load_adapter(self, adapter: Adapter) -> float:
        if self.hangs:
            await asyncio.Event().wait()
        if adapter.directory in self.bad:
            self.loaded[adapter.number] = adapter  # by some of its workers
            raise RuntimeError("no such file")
        assert adapter.number not in self.loaded
        self.loaded[adapter.number] = adapter
        assert len(self.loaded) <= 2
        return 0.01

    async def unload_adapter(self, adapter: Adapter) -> None:
        assert adapter.requests == 0
        del self.loaded[adapter.number]

    async def adapter_layers(self) -> frozenset[str]:
        return LAYERS


class Stand:
    def __init__(self, watchdog_s: float = 5.0) -> None:
        self.engine = Engine()
        self.adapters = RolloutAdapters(self.engine, places=2, first=2, max_rank=8, watchdog_s=watchdog_s)

    async def apply(self, version: int) -> None:
        assert await self.adapters.load(Path(f"v{version}"), version=version) == 0.01
        assert await self.adapters.gap(ONE) == 0
        assert self.adapters.conclude(verified=True)

    def begin(self) -> "asyncio.Task[Partial | None]":
        return asyncio.create_task(self.adapters.begin((1,), Sampling(max_tokens=9), seed=None).ended())

    @property
    def versions(self) -> list[int]:
        return [adapter.version for adapter in self.engine.loaded.values()]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def manifest(adapter: AdapterForm | None) -> WeightManifest:
    return WeightManifest("policy", 7, 7, (), (), ONE, 1, 0, adapter)


async def test_before_the_first_version_rollouts_are_on_the_model_as_loaded() -> None:
    stand = Stand()
    ending = stand.begin()
    await turns()
    assert stand.engine.requests[0].adapter is None
    stand.engine.requests[0].finish()
    await ending


async def test_a_request_ends_on_the_adapter_it_began_with_which_then_leaves() -> None:
    stand = Stand()
    await stand.apply(1)
    first = stand.begin()
    await stand.apply(2)
    second = stand.begin()
    await turns()
    assert stand.versions == [1, 2]
    stand.engine.requests[0].finish()
    part = await first
    assert part is not None
    assert part.version_spans[0].version == 1
    await turns()
    assert stand.versions == [2]
    stand.engine.requests[1].finish()
    await second
    await turns()
    assert stand.versions == [2]


async def test_a_version_that_finds_no_place_cuts_the_oldest_samples_and_no_others() -> None:
    stand = Stand()
    tasks = []
    for version in (1, 2):
        await stand.apply(version)
        tasks += [stand.begin(), stand.begin()]
    await turns()
    await stand.apply(3)
    assert [request.was_cut for request in stand.engine.requests] == [True, True, False, False]
    assert stand.versions == [2, 3]
    for request in stand.engine.requests:
        request.finish()
    await asyncio.gather(*tasks)


async def test_a_request_that_is_cancelled_lets_its_adapter_go() -> None:
    stand = Stand()
    await stand.apply(1)
    running = stand.begin()
    await turns()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await stand.apply(2)
    await turns()
    assert stand.versions == [2]


async def test_the_version_in_use_can_be_checked_again() -> None:
    stand = Stand()
    with pytest.raises(WeightsError, match="none to check"):
        await stand.adapters.gap(ONE)
    await stand.apply(1)
    stand.engine.logprob = -3.0
    assert await stand.adapters.gap(ONE) == 2.0
    assert [adapter.requests for adapter in stand.adapters.adapters] == [0]


async def test_a_version_that_failed_its_check_leaves_and_the_one_before_goes_on() -> None:
    stand = Stand()
    await stand.apply(1)
    await stand.adapters.load(Path("v2"), version=2)
    stand.engine.logprob = -3.0
    assert await stand.adapters.gap(ONE) == 2.0
    assert stand.adapters.conclude(verified=False)
    await turns()
    running = stand.begin()
    await turns()
    assert stand.versions == [1]
    assert stand.engine.requests[0].adapter in stand.engine.loaded.values()
    stand.engine.requests[0].finish()
    await running


async def test_what_cannot_be_loaded_is_taken_from_the_artefact() -> None:
    stand = Stand()
    stand.engine.bad = {Path("staged")}
    await stand.adapters.load(Path("staged"), version=1, fallback=Path("artefact"))
    assert [adapter.directory for adapter in stand.engine.loaded.values()] == [Path("artefact")]


async def test_what_cannot_be_loaded_at_all_takes_no_place() -> None:
    stand = Stand()
    stand.engine.bad = {Path("v1")}
    for _ in range(5):
        with pytest.raises(WeightsError, match=r"v1: the engine cannot load the adapter of version 1: .*no such file"):
            await stand.adapters.load(Path("v1"), version=1, fallback=Path("v1"))
        assert stand.adapters.conclude(verified=False)
    await turns()
    assert stand.adapters.adapters == ()
    assert stand.engine.loaded == {}
    assert not stand.adapters.broken


async def test_an_engine_that_does_not_answer_is_to_be_replaced() -> None:
    stand = Stand(watchdog_s=0.05)
    stand.engine.hangs = True
    with pytest.raises(EngineBroken, match=r"push\.watchdog_s=0\.05"):
        await stand.adapters.load(Path("v1"), version=1)
    assert stand.adapters.broken


async def test_requests_that_do_not_end_hold_a_new_version_back_and_not_for_ever() -> None:
    stand = Stand(watchdog_s=0.05)
    tasks = []
    for version in (1, 2):
        await stand.apply(version)
        tasks.append(stand.begin())
    await turns()

    async def deaf() -> None: ...

    stand.engine.requests[0].cut = deaf  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match=r"version 3 found no place .*watchdog_s=0\.05 s: version 1 \(leaving"):
        await stand.adapters.load(Path("v3"), version=3)
    assert not stand.adapters.broken
    for task in tasks:
        task.cancel()


async def test_an_engine_that_cannot_score_gives_no_gap() -> None:
    stand = Stand()
    await stand.adapters.load(Path("v1"), version=1)
    stand.engine.logprob = float("nan")
    assert await stand.adapters.gap(ONE) == NO_GAP


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (None, "version 7 is whole weights, but this fleet has sharing.mode=adapter"),
        (AdapterForm(16, ("q_proj",), "b"), "rank 16 (train.lora.r), above sharing.max_lora_rank=8"),
        (AdapterForm(8, ("q_proj", "up_proj"), "b"), "changes up_proj (train.lora.target_modules)"),
    ],
)
async def test_a_version_that_the_engine_cannot_take_is_refused_with_both_values(
    form: AdapterForm | None, words: str
) -> None:
    stand = Stand()
    await stand.adapters.start()
    assert words in stand.adapters.refusal(manifest(form))
    assert stand.adapters.refusal(manifest(AdapterForm(8, ("q_proj", "v_proj"), "b"))) == ""
