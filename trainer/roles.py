"""A group of workers, that of one role: started together, given a batch by data-parallel rank, answering in order.

The ranks of policy and critic, which are trained, form a torch group each; those of reference and reward do not talk
to each other.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.errors import NightshiftError
from trainer.config import Role, WorkersConfig
from trainer.errors import WorkerDied
from trainer.placement import Place
from trainer.worker import actor_class
from trainer.worker_log import WorkerLog

_GRACE_S = 10.0
"""A dead rank makes the others fail sooner than Ray tells of it; one that raised leaves them waiting for minutes."""


class RoleGroup:
    """The actors of one role, rank by rank."""

    def __init__(self, role: Role, actors: Sequence[Any], place: Place) -> None:
        self.role = role
        self._actors = list(actors)
        self._place = place
        self._logs: list[WorkerLog] = []

    @classmethod
    def create(cls, role: Role, workers: WorkersConfig, place: Place) -> "RoleGroup":
        """Start the processes of every rank: all, or none and the place is left."""
        place.enter()
        group = cls(role, [], place)
        try:
            for rank in range(workers.world_size):
                options = {"runtime_env": {"env_vars": _environment(workers)}, **place.options(rank, workers)}
                actor = actor_class(role).options(name=None, **options)
                group._actors.append(actor.remote(rank, workers.world_size, workers.threads))
        except BaseException:
            group.close()
            raise
        return group

    async def find_logs(self) -> None:
        """Ask every rank where its log is, to show the end of it when the process is gone. Raises WorkerDied."""
        self._logs = await self.call("log")

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
        results = await answers([asyncio.ensure_future(_awaited(ref)) for ref in refs], grace_s=_GRACE_S)
        # A dead rank makes the others fail in their collectives: name the cause, not its consequences.
        errors = [(first_rank + i, r) for i, r in enumerate(results) if isinstance(r, BaseException)]
        for rank, error in errors:
            if isinstance(error, RayActorError):
                raise WorkerDied(
                    f"{self.role} worker {rank} of {self.world_size} died: {_first_line(error)}"
                    + (self._logs[rank].end() if self._logs else "")
                ) from error
        for rank, error in errors:
            if isinstance(error, RayTaskError) and isinstance(error.cause, NightshiftError):
                raise error.cause from None
            if isinstance(error, RayError):
                raise WorkerDied(f"{self.role} worker {rank} of {self.world_size} failed: {error}") from error
            raise error
        return results

    def close(self) -> None:
        """Kill the processes and leave their place."""
        for actor in self._actors:
            ray.kill(actor)
        self._place.leave()


async def answers(waiting: Sequence["asyncio.Future[Any]"], *, grace_s: float) -> list[Any]:
    """What each rank answers or raises; None for one that is silent `grace_s` after another has failed.

    Raises the NightshiftError of a rank at once: the others may wait for that rank in a collective.
    """
    for one in waiting:
        one.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may ask
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    for error in (one.exception() for one in done):
        if isinstance(error, RayTaskError) and isinstance(error.cause, NightshiftError):
            raise error.cause from None
    _, silent = await asyncio.wait(waiting, timeout=grace_s)
    for one in silent:
        one.cancel()
    return [None if one in silent else one.exception() or one.result() for one in waiting]


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
