"""A CPU engine's processes leave the cores to those who compute."""

import asyncio

import psutil
import pytest

from rollout.types import Sampling
from tests.engine_rig import SEATS, Rig

pytestmark = pytest.mark.timeout(600)


def cpu_s(name: str) -> float:
    """Of the engine's processes of a name, since their start."""
    found = [p for p in psutil.Process().children(recursive=True) if p.name().startswith(name)]
    assert found
    return sum(p.cpu_times().user + p.cpu_times().system for p in found)


async def test_the_engines_processes_compute_or_sleep(rig: Rig) -> None:
    await rig.engine.set_version(0)
    core, worker = cpu_s("VLLM::EngineCor"), cpu_s("VLLM::Worker")
    generations = [rig.engine.begin((72, i), Sampling(max_tokens=150), seed=i) for i in range(SEATS)]
    await asyncio.gather(*(generation.ended() for generation in generations))
    idle = cpu_s("VLLM::Worker")
    assert cpu_s("VLLM::EngineCor") - core < 0.6 * (idle - worker)
    await asyncio.sleep(0.8)
    assert cpu_s("VLLM::Worker") - idle < 0.2
