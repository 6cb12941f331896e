"""A worker that cannot load says so in its answer: an error raised in one would be left over for the next call."""

import shutil
from pathlib import Path

import pytest

from rollout.errors import WeightsError
from services.rehearsal import independent_logprobs
from services.swap import WeightSwap
from tests.engine_rig import Rig

IDS = (72, 73, 74, 75)


async def test_a_load_that_fails_is_said_by_every_worker_and_the_engine_takes_the_next_one(
    rig: Rig, tmp_path: Path
) -> None:
    shutil.copytree(rig.model, broken := tmp_path / "broken")
    for file in broken.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-64])
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
