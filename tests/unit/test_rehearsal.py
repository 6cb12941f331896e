"""The rehearsal fits the context of the engine it is for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollout.config import ModelConfig
from services.config import FleetConfig
from services.rehearsal import RehearsalFailed, independent_logprobs, rehearse
from services.sharing import rehearsed
from services.staging import Staging
from services.swap import WeightSwap
from tests.tiny_models import build_policy


class IndependentEngine:
    """Computes with transformers what an engine would, and refuses what one would."""

    def __init__(self, model: Path, max_scored_tokens: int) -> None:
        self.model = model
        self.max_scored_tokens = max_scored_tokens
        self.longest = 0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None: ...

    async def put_back(self) -> None: ...

    async def first_tokens(self, *, within_s: float) -> None: ...

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None: ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        self.model = directory

    async def set_version(self, version: int) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert len(token_ids) <= self.max_scored_tokens
        self.longest = max(self.longest, len(token_ids))
        return independent_logprobs(self.model, (tuple(token_ids),))[0]


async def test_the_rehearsal_of_an_engine_with_a_short_context_uses_all_of_it(tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy", "qwen3_tied")
    staging = Staging(tmp_path / "staging", "host-1-a")
    staging.prepare()
    for independent_limit in (1 << 30, 0):
        engine = IndependentEngine(model, max_scored_tokens=15)
        swap = WeightSwap(engine, watchdog_s=60)
        gap = await rehearse(
            swap,
            model=model,
            staging=staging,
            dtype="float32",
            tolerance=0.05,
            independent_limit=independent_limit,
        )
        assert gap < 0.001
        assert engine.longest == 15
    staging.close()


class DeadEngine(IndependentEngine):
    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        raise RuntimeError("head_dim=16 is not supported")


async def test_an_engine_that_cannot_compute_is_not_said_to_have_old_weights(tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy", "qwen3_tied")
    staging = Staging(tmp_path / "staging", "host-1-a")
    staging.prepare()
    swap = WeightSwap(DeadEngine(model, max_scored_tokens=15), watchdog_s=60)
    with pytest.raises(RehearsalFailed, match=r"cannot compute with perturbed weights: .*head_dim=16 is not supported"):
        await rehearse(swap, model=model, staging=staging, dtype="float32", tolerance=0.05)
    staging.close()


class OneModel(IndependentEngine):
    """Its second copy computes with layers of the first, so that nothing that comes into the copy is ever in use."""

    prepared = second = False

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None:
        self.prepared = True

    async def put_back(self) -> None:
        self.second = False

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        self.second, self.prepared = self.second or self.prepared, False
        if not self.second:
            self.model = directory


async def test_a_model_that_cannot_be_prepared_beside_itself_is_loaded_in_the_pause(
    tmp_path: Path,
) -> None:
    model = build_policy(tmp_path / "policy", "qwen3_tied")
    config = FleetConfig(model=ModelConfig(path=model))
    staging = Staging(tmp_path / "staging", "host-1-a")
    staging.prepare()
    swap = WeightSwap(OneModel(model, max_scored_tokens=64), watchdog_s=60)
    assert await rehearsed(swap, config, staging=staging, dtype="float32") < 0.001
    assert not await swap.give_up_ahead()
    staging.close()
