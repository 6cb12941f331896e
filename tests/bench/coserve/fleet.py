"""The fleet under test: Redis, Ray, Serve, one engine replica and the gateway, started once and told each arm's
settings while it runs."""

import asyncio

from tests.bench.bench_fleet import BenchFleet

from .arms import Settings

_RECONFIGURE_S = 30.0


class CoserveFleet(BenchFleet):
    """One replica, whose settings change while it runs."""

    async def reconfigure(self, settings: Settings) -> None:
        """Have the replica share the engine by these settings from now on."""
        await asyncio.to_thread(self._reconfigure, settings)

    async def engine_tokens(self) -> int:
        """Tokens that the engine says it generated since its start, for whomever."""
        return await asyncio.to_thread(self._engine_tokens)

    def _reconfigure(self, settings: Settings) -> None:
        from ray import serve

        handle = serve.get_deployment_handle(self._deployment, self.config.fleet)
        plain = {section: dict(values) for section, values in settings.items()}
        handle.reconfigure.remote(plain).result(timeout_s=_RECONFIGURE_S)

    @property
    def _deployment(self) -> str:
        return f"EngineServer:{self.config.model.name}"

    def _engine_tokens(self) -> int:
        """vLLM counts in the replica's process and nothing there serves the page, so the actor is asked to read it."""
        import ray
        from ray.util import list_named_actors

        def counted(_actor: object) -> float:
            from prometheus_client import REGISTRY

            samples = [s for family in REGISTRY.collect() for s in family.samples]
            return sum(s.value for s in samples if s.name == "vllm:generation_tokens_total")

        actors = list_named_actors(all_namespaces=True)
        (replica,) = [a for a in actors if f"#{self._deployment}#" in a["name"]]
        actor = ray.get_actor(replica["name"], namespace=replica["namespace"])
        return int(ray.get(actor.__ray_call__.remote(counted), timeout=_RECONFIGURE_S))
