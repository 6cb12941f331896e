"""Groups of workers, one a role: started together, given a batch by data-parallel rank, answering in order.

The ranks of policy and critic, which are trained, form a torch group each; those of reference and reward do not talk
to each other.
"""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.errors import NightshiftError
from trainer.config import WorkersConfig
from trainer.critic import CriticSpec
from trainer.errors import WorkerDied
from trainer.policy import PolicySpec
from trainer.reward_model import RewardModelSpec
from trainer.worker import actor_class


class RoleGroup:
    """The actors of one role, rank by rank."""

    def __init__(self, role: str, actors: Sequence[Any], placement: PlacementGroup) -> None:
        self.role = role
        self._actors = list(actors)
        self._placement = placement

    @classmethod
    async def create(cls, role: str, workers: WorkersConfig) -> "RoleGroup":
        """Reserve resources for every rank at once and start the processes. Raises WorkerDied when they do not fit."""
        bundle = {"CPU": workers.cpus, **({"GPU": 1.0} if workers.device == "cuda" else {})}
        bundle = {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}
        placement = placement_group([bundle] * workers.world_size, strategy="PACK")
        try:
            await asyncio.wait_for(placement.ready(), workers.start_timeout_s)
        except asyncio.CancelledError:
            remove_placement_group(placement)
            raise
        except TimeoutError:
            remove_placement_group(placement)
            raise WorkerDied(
                f"{role}: the Ray cluster has no room for workers.world_size={workers.world_size} x {bundle}"
                f" after workers.start_timeout_s={workers.start_timeout_s} s; it offers {ray.available_resources()}"
            ) from None
        actors = [
            actor_class(role)
            .options(
                name=None,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
                runtime_env={"env_vars": _environment(workers)},
            )
            .remote(rank, workers.world_size, workers.threads)
            for rank in range(workers.world_size)
        ]
        return cls(role, actors, placement)

    @property
    def world_size(self) -> int:
        return len(self._actors)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; results by rank. Raises what a rank raised, or WorkerDied."""
        return await self._gather([getattr(actor, method).remote(*args) for actor in self._actors])

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        """`shares[rank]` to each rank; results by rank."""
        calls = zip(self._actors, shares, strict=True)
        return await self._gather([getattr(actor, method).remote(share, *args) for actor, share in calls])

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        """One rank alone; only for what is not a collective."""
        return (await self._gather([getattr(self._actors[rank], method).remote(*args)], first_rank=rank))[0]

    async def _gather(self, refs: Sequence[Any], first_rank: int = 0) -> list[Any]:
        waiting = [asyncio.ensure_future(_awaited(ref)) for ref in refs]
        await _first_of_our_errors(waiting)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        # A dead rank makes the others fail in their collectives: name the cause, not its consequences.
        errors = [(first_rank + i, r) for i, r in enumerate(results) if isinstance(r, BaseException)]
        for rank, error in errors:
            if isinstance(error, RayActorError):
                raise WorkerDied(
                    f"{self.role} worker {rank} of {self.world_size} died: {_first_line(error)}"
                ) from error
        for rank, error in errors:
            if isinstance(error, RayTaskError):
                cause = error.cause
                if isinstance(cause, NightshiftError):
                    raise cause from None
                raise WorkerDied(f"{self.role} worker {rank} of {self.world_size} failed: {error}") from error
            raise error
        return results

    def close(self) -> None:
        """Kill the processes and free their place."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._placement)


async def _first_of_our_errors(waiting: Sequence["asyncio.Future[Any]"]) -> None:
    """Raises the NightshiftError of a rank without waiting for others, which may wait for that rank in a collective."""
    for one in waiting:
        one.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may ask
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    for error in (one.exception() for one in done):
        if isinstance(error, RayTaskError) and isinstance(error.cause, NightshiftError):
            raise error.cause from None


async def start_policy(workers: WorkersConfig, spec: PolicySpec) -> RoleGroup:
    """The policy group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
    group = await RoleGroup.create("policy", workers)
    return await _started(group, workers, _start_trained(group, workers, spec))


async def start_critic(workers: WorkersConfig, spec: CriticSpec) -> RoleGroup:
    """The critic group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
    group = await RoleGroup.create("critic", workers)
    return await _started(group, workers, _start_trained(group, workers, spec))


async def _start_trained(group: RoleGroup, workers: WorkersConfig, spec: PolicySpec | CriticSpec) -> None:
    nodes = await group.call("node")
    host = "127.0.0.1" if len(set(nodes)) == 1 else await group.call_rank(0, "address")
    port = await group.call_rank(0, "open_rendezvous", host)
    await group.dispatch("start", local_ranks(nodes, workers.device), spec, host, port)


async def start_reference(workers: WorkersConfig, model_dir: Path) -> RoleGroup:
    """The frozen reference group, model loaded. Raises ModelError, WorkerDied."""
    group = await RoleGroup.create("reference", workers)
    return await _started(group, workers, group.call("start", str(model_dir), workers))


async def start_reward(workers: WorkersConfig, spec: RewardModelSpec) -> RoleGroup:
    """The frozen reward group, model loaded. Raises ModelError, WorkerDied."""
    group = await RoleGroup.create("reward", workers)
    return await _started(group, workers, group.call("start", spec))


async def _started(group: RoleGroup, workers: WorkersConfig, starting: Awaitable[object]) -> RoleGroup:
    """The group once it has started; closed when that fails or takes too long."""
    try:
        await within_start_timeout(group.role, workers, starting)
    except BaseException:
        group.close()
        raise
    return group


async def within_start_timeout(role: str, workers: WorkersConfig, starting: Awaitable[object]) -> None:
    """Raises WorkerDied when the workers are not ready in time."""
    try:
        async with asyncio.timeout(workers.start_timeout_s) as limit:
            await starting
    except TimeoutError:
        if not limit.expired():
            raise
        raise WorkerDied(
            f"{role}: {workers.world_size} worker(s) did not start and load the model within"
            f" workers.start_timeout_s={workers.start_timeout_s} s; raise it for a large model or a slow disk"
        ) from None


def local_ranks(nodes: Sequence[str], device: str) -> list[int]:
    """LOCAL_RANK of every rank, given the node each runs on.

    It is also the index of the device that DeepSpeed takes, and Ray shows every worker its own GPU alone.
    """
    if device == "cuda":
        return [0] * len(nodes)
    return [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]


def _environment(workers: WorkersConfig) -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": str(workers.threads),
        "DS_ACCELERATOR": workers.device,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


async def _awaited(ref: Any) -> Any:
    return await ref


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
