"""The role groups of a run: started, restored and saved together."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rollout.errors import ConfigError
from trainer.adapter_reference import AdapterReference
from trainer.checkpoint import Checkpoint
from trainer.config import TrainConfig
from trainer.critic import CriticSpec
from trainer.lora import adapter_in, base_digests, check_base, write_base
from trainer.models import check_same_tokens
from trainer.policy import PolicySpec
from trainer.reward_model import RewardModelSpec
from trainer.worker_group import GroupStarter, WorkerGroup

_CRITIC_STATE = "critic-state"


@dataclass(frozen=True, slots=True)
class Workers:
    """Those that a run has."""

    policy: WorkerGroup
    reference: WorkerGroup | None = None
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None
    base_digests: Mapping[str, str] = field(default_factory=dict)
    """Of the weights that an adapter is trained on."""

    async def save(self, directory: Path, *, bucket_bytes: int) -> None:
        """Models and optimizer states of the trained groups into a checkpoint's directory. Raises WorkerDied."""
        await self.policy.call("save_policy", str(directory / "policy"), bucket_bytes)
        if self.base_digests:
            write_base(directory / "policy", self.base_digests)
        await self.policy.call("save_state", str(directory))
        if self.critic is None:
            return
        for name in ("critic", _CRITIC_STATE):
            (directory / name).mkdir()
        await self.critic.call("export", str(directory / "critic"), bucket_bytes)
        await self.critic.call("save_state", str(directory / _CRITIC_STATE))


async def start_workers(
    stack: AsyncExitStack, config: TrainConfig, checkpoint: Checkpoint | None, groups: GroupStarter
) -> Workers:
    """Every group that the configuration asks for, restored from the checkpoint; `stack` ends them.

    Raises ModelError, WorkerDied, CheckpointError, and ConfigError where the critic reads other tokens than the policy
    or the checkpoint has none.
    """
    digests = await asyncio.to_thread(base_digests, config.model.path) if config.lora else {}
    policy = await groups.start_policy(config.workers, _policy_spec(config, checkpoint, digests))
    stack.callback(policy.close)
    critic = await _start_critic(stack, config, checkpoint, groups)
    reference = await _start_reference(stack, config, groups, policy)
    reward = await _start_reward(stack, config, groups)
    if checkpoint is not None:
        # The policy last: groups that share a process share its random state, and it is the policy's that counts.
        await policy.call("load_state", str(checkpoint.directory.resolve()))
    return Workers(policy, reference, critic, reward, digests)


async def packing_settled(config: TrainConfig, workers: Workers) -> TrainConfig:
    """The settings with packing off where a rank of the policy or the reference cannot be sent packed rows."""
    packs = [
        one for group in (workers.policy, workers.reference) if group is not None for one in await group.call("packs")
    ]
    if all(packs):
        return config
    return config.model_copy(update={"workers": config.workers.model_copy(update={"packing": "off"})})


def _policy_spec(config: TrainConfig, checkpoint: Checkpoint | None, digests: Mapping[str, str]) -> PolicySpec:
    adapter_dir = adapter_in(checkpoint.policy_dir.resolve(), config.lora) if checkpoint else None
    if adapter_dir is not None:
        check_base(adapter_dir, config.model.path, digests)
    model_dir = checkpoint.policy_dir if checkpoint and adapter_dir is None else config.model.path
    return PolicySpec(
        model_dir.resolve(), config.workers, config.optimizer, config.algorithm, config.seed, config.lora, adapter_dir
    )


async def _start_reference(
    stack: AsyncExitStack, config: TrainConfig, groups: GroupStarter, policy: WorkerGroup
) -> WorkerGroup | None:
    """A group of its own, or the policy without its adapter; None where the algorithm needs none."""
    if config.algorithm.kl_coef == 0:
        return None
    if config.lora is not None:
        return AdapterReference(policy)
    reference = await groups.start_reference(config.workers, config.model.path.resolve())
    stack.callback(reference.close)
    return reference


async def _start_reward(stack: AsyncExitStack, config: TrainConfig, groups: GroupStarter) -> WorkerGroup | None:
    if config.reward_model is None:
        return None
    workers = config.group_workers["reward"]
    spec = RewardModelSpec(
        config.reward_model.path.resolve(), config.model.path.resolve(), workers, config.reward_model
    )
    reward = await groups.start_reward(workers, spec)
    stack.callback(reward.close)
    return reward


async def _start_critic(
    stack: AsyncExitStack, config: TrainConfig, checkpoint: Checkpoint | None, groups: GroupStarter
) -> WorkerGroup | None:
    if config.critic is None:
        return None
    model_dir = config.critic.path or config.model.path
    check_same_tokens(config.model.path, model_dir, knob="train.critic.path")
    if checkpoint is not None:
        model_dir = checkpoint.directory / "critic"
        if not model_dir.is_dir():
            raise ConfigError(
                f"{checkpoint.directory} holds no critic, but [train.critic] is set: the run was begun without one."
                f" Give the new run another name and start it from model.path={checkpoint.policy_dir}"
            )
    spec = CriticSpec(model_dir.resolve(), config.critic_workers, config.critic)
    critic = await groups.start_critic(config.critic_workers, spec)
    stack.callback(critic.close)
    if checkpoint is not None:
        await critic.call("load_state", str((checkpoint.directory / _CRITIC_STATE).resolve()))
    return critic
