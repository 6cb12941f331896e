"""The fleet under test: Redis, Ray, Serve, engine replicas and the gateway, started once and told each arm's settings
while it runs."""

import asyncio
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.bench.bench_fleet import BenchFleet

from .arms import Settings
from .plan import Plan

_RECONFIGURE_S = 30.0
_AGAIN_S = 0.2
_REPLICAS = """\
[fleet.autoscaling]
min_replicas = {replicas}
max_replicas = {replicas}
"""


class CoserveFleet(BenchFleet):
    """`plan.replicas` of them, whose settings change while they run."""

    def __init__(self, directory: Path, plan: Plan, *, model: Path, port: int) -> None:
        super().__init__(
            directory,
            model=model,
            port=port,
            seats=plan.seats,
            prefill_chunk=plan.prefill_chunk,
            first_token_steps=plan.first_token_steps,
            push_rollouts=plan.push_rollouts,
            more=_REPLICAS.format(replicas=plan.replicas),
        )
        self._replicas = plan.replicas

    async def reconfigure(self, settings: Settings) -> None:
        """Have every replica share its engine by these settings from now on. Raises RuntimeError where one does not
        hear of them."""
        await asyncio.to_thread(self._reconfigure, settings)

    async def engine_tokens(self) -> int:
        """Tokens that the engines say they generated since their start, for whomever."""
        return await asyncio.to_thread(self._engine_tokens)

    def _reconfigure(self, settings: Settings) -> None:
        plain = {section: dict(values) for section, values in settings.items()}
        until = time.monotonic() + _RECONFIGURE_S
        while (heard := self._broadcast(plain)) < self._replicas:
            if time.monotonic() > until:
                raise RuntimeError(f"{heard} replicas heard of other settings, the bench has {self._replicas}")
            time.sleep(_AGAIN_S)

    def _broadcast(self, settings: dict[str, Any]) -> int:
        """To how many."""
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            return len(self._handle.broadcast("reconfigure", settings).results(timeout_s=_RECONFIGURE_S))
        except DeploymentUnavailableError:  # the handle is new, and has not heard of any replica yet
            return 0

    @cached_property
    def _handle(self) -> Any:
        from ray import serve

        return serve.get_deployment_handle(self._deployment, self.config.fleet)

    @property
    def _deployment(self) -> str:
        return f"EngineServer:{self.config.model.name}"

    def _engine_tokens(self) -> int:
        """vLLM counts in the replica's process and nothing there serves the page, so the actors are asked to read
        it."""
        import ray
        from ray.util import list_named_actors

        def counted(_actor: object) -> float:
            from prometheus_client import REGISTRY

            samples = [s for family in REGISTRY.collect() for s in family.samples]
            return sum(s.value for s in samples if s.name == "vllm:generation_tokens_total")

        named = [a for a in list_named_actors(all_namespaces=True) if f"#{self._deployment}#" in a["name"]]
        if len(named) != self._replicas:
            raise RuntimeError(f"Serve has {len(named)} replicas, the bench wants {self._replicas}")
        actors = [ray.get_actor(a["name"], namespace=a["namespace"]) for a in named]
        asked = [actor.__ray_call__.remote(counted) for actor in actors]
        return int(sum(ray.get(asked, timeout=_RECONFIGURE_S)))
