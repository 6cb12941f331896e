"""One session of a run, once it is claimed and read: start the workers, restore them, train."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from rollout.board import Board
from rollout.prompts import Prompt
from rollout.queue import RolloutQueue
from rollout.types import GroupState
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import WorkerDied, WorkerLost
from trainer.feeder import Feed
from trainer.fleet_fit import check_fleet
from trainer.signals import Signals

if TYPE_CHECKING:
    from trainer.holder import Holder
    from trainer.intake import PolicyLimits
    from trainer.loop import Parts
    from trainer.publish import Publisher
    from trainer.worker_group import GroupStarter
    from trainer.workers import Workers

log = structlog.get_logger(__name__)

_CANARY_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was read from disk before any worker was started."""

    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    checkpoints: CheckpointStore
    checkpoint: Checkpoint | None
    """To resume from."""

    @property
    def cursor(self) -> int:
        """Where the run's data goes on."""
        return self.checkpoint.state.data_cursor if self.checkpoint else 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What the trainer holds of the run."""

    queue: RolloutQueue
    board: Board
    token: int


async def train(
    stack: AsyncExitStack,
    config: TrainConfig,
    claim: Claim,
    inputs: Inputs,
    signals: Signals,
    *,
    feed: Feed,
    groups: "GroupStarter",
) -> None:
    """Until the steps are done, the data is used up or a signal asks for a stop; `stack` ends what is started here.

    Raises what the workers and `loop.TrainingLoop.run` raise, WorkerLost where a worker died once training had begun,
    ConfigError where the fleet's engines cannot load what the run publishes.
    """
    from trainer.health import HealthServer
    from trainer.holder import Holder
    from trainer.loop import TrainingLoop
    from trainer.workers import packing_settled, start_workers

    checkpoint = inputs.checkpoint
    health = HealthServer(config.health_port)
    if config.health_port:  # before the workers load, which takes minutes where the model is large
        await health.start()
        stack.push_async_callback(health.close)
    check_fleet(config.lora, config.fleet, await claim.board.replicas(config.fleet))  # before the fleet follows it
    await claim.board.register_run(config.fleet, config.run)
    await claim.board.attach(config.fleet, config.run, claim.token)
    if checkpoint is not None:
        log.info("resuming", step=checkpoint.state.step, checkpoint=str(checkpoint.directory))
        await claim.queue.settle(claim.token, checkpoint.state.settled_ids, GroupState.TRAINED)
    workers = await start_workers(stack, config, checkpoint, groups)
    config = await packing_settled(config, workers)
    hold_s = config.evaluation.hold_s
    holder = Holder(claim.board, fleet=config.fleet, run=config.run, token=claim.token, hold_s=hold_s)
    await holder.let_go()  # of a replica that a killed session held
    parts = _parts(stack, config, claim, inputs, feed, workers=workers, holder=holder)
    loop = TrainingLoop(config, parts, checkpoint.state if checkpoint else None)
    health.status = loop.status
    signals.stop = loop.stop
    try:
        await loop.run()
    except WorkerDied as error:
        signals.stop = None  # from here on there is nothing that could stop between steps
        raise WorkerLost(str(error)) from error


def _parts(
    stack: AsyncExitStack,
    config: TrainConfig,
    claim: Claim,
    inputs: Inputs,
    feed: Feed,
    *,
    workers: "Workers",
    holder: "Holder",
) -> "Parts":
    from trainer.journal import Journal
    from trainer.loop import Parts
    from trainer.metrics import MetricsLog

    journal, metrics = Journal(config.run_dir / "journal.jsonl"), MetricsLog(config.run_dir)
    stack.callback(journal.close)
    stack.callback(metrics.close)
    return Parts(
        queue=claim.queue,
        token=claim.token,
        workers=workers,
        publisher=_publisher(config, claim, inputs.prompts, workers),
        feed=feed,
        journal=journal,
        checkpoints=inputs.checkpoints,
        metrics=metrics,
        eval_prompts=inputs.eval_prompts,
        holder=holder,
        limits=_limits(config),
    )


def _limits(config: TrainConfig) -> "PolicyLimits":
    """Of a group that policy and critic can both compute."""
    from trainer.intake import PolicyLimits
    from trainer.models import context_length, vocabulary_size

    contexts = [limit for model in config.trained_models if (limit := context_length(model)) is not None]
    return PolicyLimits(vocabulary_size(config.model.path), min(contexts, default=None))


def _publisher(config: TrainConfig, claim: Claim, prompts: Sequence[Prompt], workers: "Workers") -> "Publisher":
    from trainer.publish import Publisher, canary_sequences

    push = config.push
    return Publisher(
        board=claim.board,
        fleet=config.fleet,
        run=config.run,
        token=claim.token,
        policy_name=config.model.name,
        policy=workers.policy,
        weights_dir=config.run_dir / "weights",
        config=push,
        canary=canary_sequences(
            [p.prompt_ids for p in prompts[:_CANARY_PROMPTS]],
            sequences=push.canary_sequences,
            tokens=push.canary_tokens,
        ),
        lora=config.lora,
        base_digests=workers.base_digests,
    )
