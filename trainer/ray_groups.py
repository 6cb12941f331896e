"""Groups as Ray actors: placed, started and loaded; a `worker_group.GroupStarter`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from trainer.config import Role, TrainOptions, WorkersConfig
from trainer.critic import CriticSpec
from trainer.errors import WorkerDied
from trainer.placement import Place
from trainer.policy import PolicySpec
from trainer.reward_model import RewardModelSpec
from trainer.roles import RoleGroup

_KNOB = "workers"


class RayGroups:
    """Starts every group in a place of its own, or in that of its colocation."""

    def __init__(
        self,
        workers: Mapping[Role, WorkersConfig] | None = None,
        knobs: Mapping[Role, str] | None = None,
        colocations: Sequence[Sequence[Role]] = (),
    ) -> None:
        """By role: the processes of every group that will be started, and where they are configured."""
        self._workers = dict(workers or {})
        self._knobs = dict(knobs or {})
        self._colocation = {role: tuple(roles) for roles in colocations for role in roles}
        self._places: dict[tuple[Role, ...], Place] = {}

    @classmethod
    def of(cls, config: TrainOptions) -> "RayGroups":
        """As the run is configured."""
        return cls(config.group_workers, config.group_knobs, list(config.colocations.values()))

    async def start_policy(self, workers: WorkersConfig, spec: PolicySpec) -> RoleGroup:
        """The policy group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
        group = await self._create("policy", workers)
        return await self._started(group, workers, lambda: _start_trained(group, workers, spec))

    async def start_critic(self, workers: WorkersConfig, spec: CriticSpec) -> RoleGroup:
        """The critic group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
        group = await self._create("critic", workers)
        return await self._started(group, workers, lambda: _start_trained(group, workers, spec))

    async def start_reference(self, workers: WorkersConfig, model_dir: Path) -> RoleGroup:
        """The frozen reference group, model loaded. Raises ModelError, WorkerDied."""
        group = await self._create("reference", workers)
        return await self._started(group, workers, lambda: group.call("start", str(model_dir), workers))

    async def start_reward(self, workers: WorkersConfig, spec: RewardModelSpec) -> RoleGroup:
        """The frozen reward group, model loaded. Raises ModelError, WorkerDied."""
        group = await self._create("reward", workers)
        return await self._started(group, workers, lambda: group.call("start", spec))

    async def _create(self, role: Role, workers: WorkersConfig) -> RoleGroup:
        together = self._colocation.get(role, (role,))
        if together not in self._places or self._places[together].freed:
            groups = [self._workers[other] for other in together] if len(together) > 1 else [workers]
            self._places[together] = await Place.reserve(" + ".join(together), groups, knob=self._knob(together[0]))
        return RoleGroup.create(role, workers, self._places[together])

    async def _started(
        self, group: RoleGroup, workers: WorkersConfig, start: Callable[[], Awaitable[object]]
    ) -> RoleGroup:
        """The group once it has started; closed when that fails or takes too long."""

        async def starting() -> None:
            await group.find_logs()
            await start()

        try:
            await within_start_timeout(group.role, workers, starting(), knob=self._knob(group.role))
        except BaseException:
            group.close()
            raise
        return group

    def _knob(self, role: Role) -> str:
        return self._knobs.get(role, _KNOB)


async def _start_trained(group: RoleGroup, workers: WorkersConfig, spec: PolicySpec | CriticSpec) -> None:
    nodes = await group.call("node")
    host = "127.0.0.1" if len(set(nodes)) == 1 else await group.call_rank(0, "address")
    port = await group.call_rank(0, "open_rendezvous", host)
    await group.dispatch("start", local_ranks(nodes, workers.device), spec, host, port)


async def within_start_timeout(
    role: Role, workers: WorkersConfig, starting: Awaitable[object], *, knob: str = _KNOB
) -> None:
    """Raises WorkerDied when the workers are not ready in time."""
    try:
        async with asyncio.timeout(workers.start_timeout_s) as limit:
            await starting
    except TimeoutError:
        if not limit.expired():
            raise
        raise WorkerDied(
            f"{role}: {workers.world_size} worker(s) did not start and load the model within"
            f" {knob}.start_timeout_s={workers.start_timeout_s} s; raise it for a large model or a slow disk"
        ) from None


def local_ranks(nodes: Sequence[str], device: str) -> list[int]:
    """LOCAL_RANK of every rank, given the node each runs on.

    It is also the index of the device that DeepSpeed takes, and Ray shows every worker its own GPU alone.
    """
    if device == "cuda":
        return [0] * len(nodes)
    return [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]
