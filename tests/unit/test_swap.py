"""An engine that stops answering is noticed in bounded time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from rollout.weights import Canary, TensorSpec, WeightManifest
from services.swap import NO_GAP, EngineBroken, WeightSwap, mean_gap


class Engine:
    """Computes -1.0 for every token, of sequences of up to `max_scored_tokens`, as vLLM refuses longer ones."""

    def __init__(self, max_scored_tokens: int = 64) -> None:
        self.max_scored_tokens = max_scored_tokens

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None: ...

    async def put_back(self) -> None: ...

    async def first_tokens(self, *, within_s: float) -> None: ...

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None: ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None: ...

    async def set_version(self, version: int) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        if len(token_ids) > self.max_scored_tokens:
            raise ValueError(f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length")
        return (-1.0,) * (len(token_ids) - 1)


class HangingEngine(Engine):
    """Never answers a score, and ends an aborted one only when `gone` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = asyncio.Event()
        self.aborted = 0

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        try:
            await asyncio.Event().wait()
        finally:
            self.aborted += 1
            await self.gone.wait()
        return ()


async def test_a_canary_that_is_never_answered_is_not_verified_and_its_request_is_aborted() -> None:
    engine = HangingEngine()
    swap = WeightSwap(engine, watchdog_s=0.05)
    async with asyncio.timeout(5):
        gap = await swap.gap(Canary(((1, 2), (3, 4)), ((-1.0,), (-1.0,))))
        await asyncio.sleep(0.01)
    assert gap == NO_GAP
    assert engine.aborted == 1  # the second was not begun
    engine.gone.set()


async def test_rollouts_leave_a_seat_while_a_canary_is_computed_and_no_longer() -> None:
    spared: list[bool] = []
    inside = False

    @contextmanager
    def spare() -> Iterator[None]:
        nonlocal inside
        inside = True
        try:
            yield
        finally:
            inside = False

    class Seated(Engine):
        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            spared.append(inside)
            return await super().score(token_ids)

    assert await WeightSwap(Seated(), watchdog_s=5, spare=spare).gap(Canary(((1, 2),), ((-1.0,),))) == 0
    assert (spared, inside) == ([True], False)


async def test_sequences_of_a_canary_are_computed_one_by_one() -> None:
    running, most = 0, 0

    class Counting(Engine):
        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().score(token_ids)

    canary = Canary(((1, 2, 3), (4, 5), (6, 7)), ((-1.0, -1.0), (-1.0,), (-1.0,)))
    assert await WeightSwap(Counting(), watchdog_s=5).gap(canary) == 0.0
    assert most == 1


async def test_rollouts_are_aside_while_weights_come_in_and_not_while_they_are_prepared_or_checked() -> None:
    seen: list[str] = []

    class Noting(Engine):
        async def prepare(
            self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
        ) -> None:
            seen.append("prepare")

        async def pause(self) -> None:
            seen.append("pause")

        async def resume(self) -> None:
            seen.append("resume")

        async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
            seen.append("score")
            return await super().score(token_ids)

    @asynccontextmanager
    async def aside() -> AsyncIterator[None]:
        seen.append("aside")
        yield
        seen.append("back")

    swap = WeightSwap(Noting(), watchdog_s=5, aside=aside)
    await swap.prepare(Path("weights"))
    await swap.load(Path("weights"), version=1)
    await swap.gap(Canary(((1, 2),), ((-1.0,),)))
    assert seen == ["prepare", "aside", "pause", "resume", "back", "score"]


async def test_weights_that_cannot_be_prepared_are_loaded_in_the_pause() -> None:
    loaded: list[Path] = []

    class Unprepared(Engine):
        async def prepare(
            self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
        ) -> None:
            raise RuntimeError("no memory for a second copy")

        async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
            loaded.append(directory)

    swap = WeightSwap(Unprepared(), watchdog_s=5)
    await swap.prepare(Path("weights"))
    assert not swap.preparing
    await swap.load(Path("weights"), version=1)
    assert loaded == [Path("weights")]


async def test_nothing_is_prepared_where_the_operator_wants_no_second_copy() -> None:
    class Unasked(Engine):
        async def prepare(
            self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
        ) -> None:
            raise AssertionError("was asked")

    swap = WeightSwap(Unasked(), watchdog_s=5, ahead=False)
    await swap.prepare(Path("weights"))
    await swap.load(Path("weights"), version=1)
    assert not await swap.give_up_ahead()


class FailingEngine(Engine):
    """Ends every canary without a result, as vLLM does with an aborted request."""

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        raise RuntimeError("sample ended with 'abort'")


async def test_a_canary_whose_scoring_fails_is_not_verified() -> None:
    assert await WeightSwap(FailingEngine(), watchdog_s=5).gap(Canary(((1, 2),), ((-1.0,),))) == NO_GAP


async def test_a_canary_longer_than_the_context_is_compared_as_far_as_the_context_goes() -> None:
    canary = Canary((tuple(range(32)), (1, 2)), ((-1.0,) * 31, (-1.0,)))
    swap = WeightSwap(Engine(max_scored_tokens=16), watchdog_s=5)
    assert await swap.gap(canary) == 0.0
    off_in_the_prefix = Canary(canary.token_ids, ((-2.0,) * 31, (-1.0,)))
    assert await swap.gap(off_in_the_prefix) == 15 / 16
    off_beyond_it = Canary(canary.token_ids, ((*(-1.0,) * 15, *(-9.0,) * 16), (-1.0,)))
    assert await swap.gap(off_beyond_it) == 0.0


async def test_an_expectation_of_the_wrong_length_is_no_match_where_nothing_is_cut() -> None:
    assert await WeightSwap(Engine(), watchdog_s=5).gap(Canary(((1, 2, 3),), ((-1.0,),))) == NO_GAP
    assert mean_gap([[-1.0]], [[-1.0, -1.0]]) == NO_GAP


@pytest.mark.parametrize("ahead", [True, False])
async def test_weights_wait_for_a_crowd_to_pass_when_they_are_prepared_and_not_for_long(ahead: bool) -> None:
    waits, preparing, waiting = [], [], []

    class Crowded(Engine):
        async def prepare(
            self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
        ) -> None:
            preparing.append((swap.preparing, swap.waiting))

        async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None:
            assert wanted()
            waits.append(within_s)
            waiting.append((swap.preparing, swap.waiting))

    swap = WeightSwap(Crowded(), watchdog_s=600, ahead=ahead)
    await swap.prepare(Path("weights"))
    assert (waits, swap.waiting) == ([5.0], False), "others wait for what this replica has, however long it may take"
    assert (preparing, waiting) == ([(True, False)] * ahead, [(False, True)])


async def test_generation_stands_still_when_users_who_wait_have_their_first_tokens() -> None:
    said: list[str] = []

    class Asked(Engine):
        async def first_tokens(self, *, within_s: float) -> None:
            said.append(f"first tokens, still {swap.still_until > 0}")

        async def pause(self) -> None:
            said.append(f"pause, still {swap.still_until > 0}")

    swap = WeightSwap(Asked(), watchdog_s=5)
    await swap.load(Path("weights"), version=1)
    assert said == ["first tokens, still False", "pause, still True"]


class Choosy(Engine):
    """Loads some directories alone."""

    def __init__(self, *loads: str) -> None:
        super().__init__()
        self.loads, self.tried, self.version, self.paused = loads, list[str](), -1, False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        self.tried.append(str(directory))
        if str(directory) not in self.loads:
            raise RuntimeError(f"no weights in {directory}")

    async def set_version(self, version: int) -> None:
        self.version = version


CANARY = Canary(((1, 2),), ((-1.0,),))


async def test_an_engine_that_cannot_load_what_is_new_gets_back_what_it_was_started_with() -> None:
    engine = Choosy("model", "next")
    swap = WeightSwap(engine, watchdog_s=5, model=Path("model"))
    await swap.load(Path("copy"), version=7, fallback=Path("artefact"))
    assert engine.tried == ["copy", "artefact", "model"]
    assert (engine.version, engine.paused, swap.broken) == (0, False, "")
    assert await swap.gap(CANARY) == NO_GAP
    assert "no weights in artefact" in str(swap.unscored)
    await swap.load(Path("next"), version=8)
    assert (engine.version, await swap.gap(CANARY), swap.unscored) == (8, 0.0, None)


async def test_an_artefact_that_loads_in_the_place_of_its_copy_is_the_version() -> None:
    engine = Choosy("artefact", "model")
    swap = WeightSwap(engine, watchdog_s=5, model=Path("model"))
    await swap.load(Path("copy"), version=7, fallback=Path("artefact"))
    assert (engine.version, await swap.gap(CANARY)) == (7, 0.0)


async def test_an_engine_that_loads_nothing_any_more_is_broken() -> None:
    swap = WeightSwap(Choosy(), watchdog_s=5, model=Path("model"))
    with pytest.raises(EngineBroken, match="no weights in model"):
        await swap.load(Path("copy"), version=7, fallback=Path("artefact"))
    assert swap.broken


def test_a_version_of_another_model_is_refused_by_the_first_tensor_that_differs() -> None:
    def version(*shapes: tuple[str, tuple[int, ...]]) -> WeightManifest:
        specs = tuple(TensorSpec(name, "bfloat16", shape, "bucket") for name, shape in shapes)
        return WeightManifest("policy", 3, 3, specs, (), CANARY, 1, 0)

    swap = WeightSwap(Engine(), watchdog_s=5, shapes={"embed": (320, 64), "layers.0.norm": (64,)})
    assert not swap.refusal(version(("embed", (320, 64)), ("layers.0.norm", (64,)), ("lm_head", (320, 64))))
    assert not swap.refusal(version())
    refusal = swap.refusal(version(("layers.0.norm", (64,)), ("embed", (320, 128))))
    assert "its embed is 320 x 128, that of the fleet's model.path 320 x 64" in refusal
    assert "version 3" in refusal
