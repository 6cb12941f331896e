"""One engine for every test of a replica's loops, gone when they are through."""

from collections.abc import AsyncIterator

import pytest

from services.config import SharingConfig
from tests.engine_rig import Rig, started


@pytest.fixture(scope="package")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with started(tmp_path_factory.mktemp("engine"), SharingConfig()) as rig:
        yield rig
