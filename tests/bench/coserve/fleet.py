"""The fleet under test: Redis, Ray, Serve, one engine replica and the gateway, started once and told each arm's
settings while it runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

from deploy.config import load
from deploy.local import LocalFleet

from .arms import Settings
from .users import Door

_RECONFIGURE_S = 30.0
# float32: processors without bfloat16 instructions compute it the slower way. Small blocks: what a cut sample has is
# found in the prefix cache but for the last of them.
_TEMPLATE = """\
run = "bench"
fleet_name = "bench"
state_dir = {state}
[model]
path = {model}
[redis]
dir = {redis}
[fleet.gateway]
port = {port}
[fleet.engine]
dtype = "float32"
max_model_len = 512
max_num_seqs = {seats}
[fleet.engine.extra]
block_size = 32
"""


class CoserveFleet:
    """A context manager; raises what LocalFleet raises."""

    def __init__(self, directory: Path, *, model: Path, port: int, seats: int) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "bench.toml"
        values = {"state": directory / "state", "model": model.absolute(), "redis": directory / "redis"}
        quoted = {name: json.dumps(str(value)) for name, value in values.items()}
        path.write_text(_TEMPLATE.format(**quoted, port=port, seats=seats))
        self._local = LocalFleet(load([path]), progress=lambda phase: print(f"starting {phase}", flush=True))

    def __enter__(self) -> "CoserveFleet":
        self._local.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    @property
    def config(self) -> Any:
        """The FleetConfig, with the address of Redis."""
        return self._local.config

    @property
    def door(self) -> Door:
        return Door(self._local.url, self._local.tokens.user, self.config.model.name)

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
