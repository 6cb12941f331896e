"""The Serve deployment of an engine: Ray Serve LLM's server around a `Replica`.

start: rewards -> engine -> replica
"""

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig

from rollout.redis_store import RedisStore
from services.cache_salt import salted
from services.config import FleetConfig
from services.door import Begin, admitted
from services.environment import check_environment
from services.logs import plain_logs
from services.replica import Replica, ReplicaUnhealthy
from services.reward_pool import RewardPool
from services.role_router import ROLE
from services.serve_log import reopen_serve_log
from services.shared_memory import unlink_below
from services.step_room import VARIABLE, SharedStepRoom
from services.stream_pace import paced
from services.user_seats import sequences
from services.vllm_engine import VllmEngine
from services.way import told


class EngineServer(LLMServer):  # type: ignore[misc]
    """The Serve deployment; OpenAI routes come from `LLMServer`."""

    async def __init__(  # type: ignore[misc]  # awaited by Serve
        self, llm_config: LLMConfig, *, fleet: dict[str, Any], **kwargs: Any
    ) -> None:
        plain_logs()
        reopen_serve_log()
        self._fleet = FleetConfig.model_validate(fleet)
        self._replica: Replica | None = None
        await super().__init__(llm_config, **kwargs)

    async def start(self) -> None:
        """Start the engine and, before Serve sends users here, prove that its weights can be replaced.

        Raises ConfigError for a reward that cannot be imported and for an environment that opens the engine to others'
        code, before the engine starts: Serve tries three times, and an engine takes a minute each.
        """
        check_environment(os.environ)  # of this node, which may have more than where the application was built
        rewards = RewardPool(self._fleet.rewards)
        try:
            await rewards.check()
            # The model is a directory. To find nothing to download would cost a worker that imports vLLM as long.
            self._llm_config.get_or_create_callback().ctx.run_init_node = False
            room = SharedStepRoom()
            os.environ[VARIABLE] = room.place
            try:
                await super().start()
            finally:
                del os.environ[VARIABLE]
            room.check()
            reopen_serve_log()  # what the engine imports may have closed it again
            await asyncio.to_thread(unlink_below, os.getpid())
            self._vllm = engine = VllmEngine(self.engine._engine_client, room)
            await self._give_users_their_adapter(engine)
            store = await RedisStore.connect(self._fleet.redis)
        except BaseException:
            await rewards.close()
            raise
        self._replica = Replica(self._fleet, engine, store, rewards)
        await self._replica.start()

    async def _start_engine(self) -> None:
        """Without Ray Serve LLM's report to an actor that it starts for that, which imports vLLM: the first replica of
        a cluster would wait for it, and half a GB would stay."""
        await self.engine.start()

    async def reconfigure(self, user_config: dict[str, dict[str, Any]]) -> None:
        """Serve's `user_config`: what differs from the settings the fleet was built with, without a restart."""
        if self._replica is not None:
            self._replica.reconfigure(user_config)

    async def _give_users_their_adapter(self, engine: VllmEngine) -> None:
        if (adapter := self._fleet.sharing.user_adapter) is not None:
            # found by this name before the model of that name is, so every user's request gets it
            name = self._fleet.model.name
            self.engine._oai_models.lora_requests[name] = await engine.load_user_adapter(name, adapter)

    async def check_health(self) -> None:
        await super().check_health()
        if self._replica is not None:
            self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every few seconds and handed to `services.autoscaling`."""
        stats = None if self._replica is None else self._replica.stats()
        return {} if stats is None else dict(stats)  # type: ignore[arg-type]

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router knows of this replica, a moment later."""
        stats = dict(await super().record_routing_stats())
        if self._replica is not None and self._replica.role is not None:
            stats[ROLE] = self._replica.role.value
        return stats

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        begin = partial(super().chat, request, raw_request_info)
        return self._admitted(request, raw_request_info, begin, sequences("", request.n))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        begin = partial(super().completions, request, raw_request_info)
        return self._admitted(request, raw_request_info, begin, sequences(request.prompt, request.n))

    async def __del__(self) -> None:
        replica, self._replica = getattr(self, "_replica", None), None
        if replica is not None:
            await replica.stop()

    def _batch_output_stream(self, generator: AsyncGenerator[Any, None]) -> AsyncGenerator[list[Any], None]:
        """In the place of Ray Serve LLM's own, which holds the first token back too."""
        return paced(generator, self._fleet.engine.stream_every_s)

    def _admitted(self, request: Any, info: Any, begin: Begin, seats: int) -> AsyncGenerator[Any, None]:
        if self._replica is None:
            raise ReplicaUnhealthy("the replica is stopping")
        headers = {} if info is None else info.headers
        if (way_s := told(headers)) is not None:
            self._replica.keeper.way.hear(way_s)
        # the gateway's, or Ray Serve LLM takes one that the client may have chosen
        request.request_id = headers.get("x-request-id") or uuid.uuid4().hex
        request.cache_salt = salted(self._vllm.loads, request.cache_salt)
        return admitted(
            self._replica,
            begin,
            seats,
            name=serve.get_replica_context().replica_id.unique_id,
            times=lambda: self._vllm.times(request.request_id),
        )
