"""One engine for every test of a replica's loops, gone when they are through."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import RedisConfig
from services.config import EngineConfig
from services.engine_arguments import engine_arguments
from services.vllm_engine import VllmEngine
from tests.engine_rig import SEATS, Rig
from tests.tiny_models import build_endless_policy


@pytest.fixture(scope="package")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tmp = tmp_path_factory.mktemp("engine")
    model = build_endless_policy(tmp / "policy")
    arguments = engine_arguments(EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=SEATS))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        client = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        try:
            with EmbeddedRedis(Path(directory)) as redis:
                yield Rig(VllmEngine(client), model, RedisConfig(url=redis.url), tmp)
        finally:
            client.shutdown()
