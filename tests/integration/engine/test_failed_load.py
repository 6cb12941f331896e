"""A worker that cannot load says so in its answer: an error raised in one would be left over for the next call."""

import shutil
from pathlib import Path

import pytest

from rollout.errors import WeightsError
from rollout.weights import Canary
from services.rehearsal import independent_logprobs
from services.swap import NO_GAP, WeightSwap
from services.tensor_shapes import shapes_in
from tests.engine_rig import Rig

IDS = (72, 73, 74, 75)


@pytest.fixture
def broken(rig: Rig, tmp_path: Path) -> Path:
    """The model with the ends of its files cut off."""
    shutil.copytree(rig.model, directory := tmp_path / "broken")
    for file in directory.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-64])
    return directory


async def test_a_load_that_fails_is_said_by_every_worker_and_the_engine_takes_the_next_one(
    rig: Rig, broken: Path
) -> None:
    swap = WeightSwap(rig.engine, watchdog_s=30)
    await swap.load(rig.model, version=0)
    known = await rig.engine.score(IDS)
    await rig.engine.pause()
    arguments = {"directory": str(broken), "refresh_tied_head": True}
    assert all(await rig.client.collective_rpc("load_in_place", kwargs=arguments))
    with pytest.raises(WeightsError, match=r"[Ss]afetensor"):
        await rig.engine.reload(broken)
    await rig.engine.resume()
    await swap.load(rig.model, version=0)
    assert await rig.engine.score(IDS) == pytest.approx(known, abs=1e-5)
    assert known == pytest.approx(independent_logprobs(rig.model, (IDS,))[0], abs=1e-3)


async def test_a_version_that_no_engine_can_load_leaves_the_users_with_the_first_model(rig: Rig, broken: Path) -> None:
    swap = WeightSwap(rig.engine, watchdog_s=30, model=rig.model)
    await swap.load(rig.model, version=0)
    known = await rig.engine.score(IDS)
    await swap.prepare(broken)
    await swap.load(broken, version=7)
    assert await rig.engine.score(IDS) == pytest.approx(known, abs=1e-5)
    assert await swap.gap(Canary((IDS,), (known,))) == NO_GAP
    assert "could not be loaded" in str(swap.unscored)
    await swap.load(rig.model, version=0)
    assert await swap.gap(Canary((IDS,), (known,))) < 1e-4


def test_the_shapes_of_a_model_are_those_of_its_tensors(rig: Rig) -> None:
    shapes = shapes_in(rig.model)
    assert len(shapes) > 10
    assert all(len(shape) in {1, 2} for shape in shapes.values())
