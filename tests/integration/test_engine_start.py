"""A replica that cannot work says so before its engine starts."""

from typing import Any

import pytest
from ray.llm._internal.serve.core.server.llm_server import LLMServer

from rollout.errors import ConfigError
from services.config import FleetConfig
from services.engine import EngineServer


@pytest.mark.filterwarnings("ignore:coroutine .EngineServer.__del__")
async def test_an_environment_that_opens_the_engine_is_named_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def start(_: Any) -> None:
        begun.append("engine")

    monkeypatch.setattr(LLMServer, "start", start)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    server = object.__new__(EngineServer)
    server._fleet = FleetConfig.model_validate({"model": {"path": "/nowhere"}})
    with pytest.raises(ConfigError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        await server.start()
    assert begun == []


@pytest.mark.filterwarnings("ignore:coroutine .EngineServer.__del__")
async def test_a_reward_that_cannot_be_imported_is_named_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    async def start(_: Any) -> None:
        begun.append("engine")

    monkeypatch.setattr(LLMServer, "start", start)
    server = object.__new__(EngineServer)
    server._fleet = FleetConfig.model_validate(
        {"model": {"path": "/nowhere"}, "rewards": {"functions": {"mine": {"function": "no_such_module:score"}}}}
    )
    with pytest.raises(ConfigError, match=r"rewards\.functions\.mine.*no_such_module"):
        await server.start()
    assert begun == []
