"""One engine for every test of a replica's loops, gone when they are through."""

from collections.abc import AsyncIterator

import pytest

from services.config import SharingConfig
from tests.engine_rig import ENGINE, Rig, started
from tests.tiny_models import build_endless_policy


@pytest.fixture(scope="package")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    tmp = tmp_path_factory.mktemp("engine")
    # biases and a tied head are what a second model and a reload are most easily wrong about
    model = build_endless_policy(tmp / "policy", "qwen2_tied")
    async with started(model, tmp, SharingConfig(), ENGINE) as rig:
        yield rig
