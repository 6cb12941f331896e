"""The trainer process: claims the run, starts the workers, resumes, trains, and lets go of everything at the end."""

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rollout.board import Board
from rollout.errors import ConfigError, Fenced, NightshiftError, WriterBusy
from rollout.prompts import Prompt, read_prompts
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState
from trainer.artefact import write_text
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig
from trainer.ray_session import joined_ray
from trainer.run_lock import run_lock

if TYPE_CHECKING:
    from trainer.loop import Parts
    from trainer.roles import RoleGroup

log = structlog.get_logger(__name__)

_RETRY_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was read from disk before any worker was started."""

    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    checkpoints: CheckpointStore
    checkpoint: Checkpoint | None
    """To resume from."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the trainer holds of the run."""

    queue: RolloutQueue
    board: Board
    token: int


def run(config: TrainConfig) -> int:
    """Train until done or stopped by SIGTERM or SIGINT; 0 then. Needs `config.redis.url`.

    Raises a NightshiftError that says what went wrong (ConfigError, ModelError, StoreUnavailable, WriterBusy, Fenced,
    CheckpointError, WorkerDied, TrainingDiverged); nothing that was started stays.
    """
    os.environ.setdefault("DS_ACCELERATOR", config.workers.device)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return asyncio.run(_session(config))


async def _session(config: TrainConfig) -> int:
    from trainer.models import Tokenise, load_tokenizer

    tokenise = Tokenise(load_tokenizer(config.model.path))
    prompts = _prompts(config, config.prompts.train, tokenise)
    eval_prompts = _prompts(config, config.prompts.eval, tokenise) if config.prompts.eval else []
    config.run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=config.checkpoint.keep)
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(_Signals())
        stack.enter_context(_early_stop(signals))
        store = await RedisStore.connect(config.redis, role="trainer")
        stack.push_async_callback(store.close)
        _join_ray(stack, config, signals)
        claim = await stack.enter_async_context(_claimed(store, config))
        await stack.enter_async_context(run_lock(config.run_dir, patience_s=_patience_s(config)))
        # Not before both are held: until then an earlier trainer may still write checkpoints and retire older ones.
        checkpoint = await asyncio.to_thread(checkpoints.newest)
        inputs = Inputs(prompts, eval_prompts, checkpoints, checkpoint)
        shown = config.redis.model_copy(update={"url": config.redis.redacted_url or None})
        resolved = config.model_copy(update={"redis": shown})
        write_text(config.run_dir / "config.json", resolved.model_dump_json(indent=1))
        await _train(stack, config, claim, inputs, signals)
    return 0


@contextmanager
def _early_stop(signals: "_Signals") -> Iterator[None]:
    """A stop that came before training is an ordinary end."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.stopped_early:
            raise


def _join_ray(stack: AsyncExitStack, config: TrainConfig, signals: "_Signals") -> None:
    """Raises WorkerDied, or CancelledError when a stop came while Ray started."""
    try:
        stack.enter_context(joined_ray(config))
    except SystemExit:
        signals.stopped_early = True
        raise asyncio.CancelledError from None
    finally:
        signals.listen()


def _prompts(config: TrainConfig, path: Path, tokenise: Callable[..., tuple[Sequence[int], str]]) -> list[Prompt]:
    """Raises ConfigError also where prompt and response cannot fit the model."""
    from trainer.models import context_length

    prompts = read_prompts(path, tokenise, max_prompt_tokens=config.prompts.max_prompt_tokens)
    limit = context_length(config.model.path)
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    if limit is not None and longest + config.sampling.max_tokens > limit:
        raise ConfigError(
            f"{path}: the longest prompt has {longest} tokens, with sampling.max_tokens={config.sampling.max_tokens}"
            f" that is above the model's context of {limit}"
        )
    return prompts


@asynccontextmanager
async def _claimed(store: RedisStore, config: TrainConfig) -> AsyncIterator[Claim]:
    """Hold the run's one writer claim and renew it; the body is cancelled and Fenced raised when it is lost."""
    queue, board = RedisQueue(store, config.run), RedisBoard(store)
    token = await _acquire(queue, config)
    body = asyncio.current_task()
    lost: list[BaseException] = []

    async def renew() -> None:
        try:
            while True:
                await asyncio.sleep(config.writer_ttl_s / 3)
                await queue.renew_writer(token, ttl_s=config.writer_ttl_s)
        except NightshiftError as error:
            lost.append(error)
            if body is not None:
                body.cancel()

    renewing = asyncio.create_task(renew())
    try:
        yield Claim(queue, board, token)
    except asyncio.CancelledError:
        if lost:
            raise lost[0] from None
        raise
    finally:
        renewing.cancel()
        if not lost:
            with suppress(NightshiftError):
                await board.detach(config.fleet, config.run, token)
                await queue.release_writer(token)


async def _acquire(queue: RolloutQueue, config: TrainConfig) -> int:
    """A claim; that of a killed trainer ends by itself, so wait for it. Raises WriterBusy when another one lives."""
    # The nonce keeps a restarted container, whose pid and host name are the same again, from passing for the claimant.
    owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    give_up = time.monotonic() + _patience_s(config)
    told = False
    while True:
        try:
            return await queue.acquire_writer(owner, ttl_s=config.writer_ttl_s)
        except WriterBusy as busy:
            if time.monotonic() > give_up:
                raise
            if not told:
                log.info("waiting for the claim of an earlier trainer to end", reason=str(busy))
                told = True
            await asyncio.sleep(_RETRY_S)


def _patience_s(config: TrainConfig) -> float:
    """How long an earlier trainer of the run may take to be gone: the claim of a killed one lapses by then."""
    return 1.5 * config.writer_ttl_s


class _Signals:
    """SIGTERM and SIGINT ask for a clean stop. Before there is training to stop, and at the second one, they cancel."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        """Set once training can be stopped between steps."""
        self.stopped_early = False
        """Asked to stop before there was anything to lose."""
        self._asked = False
        self._task = asyncio.current_task()

    def __enter__(self) -> "_Signals":
        self.listen()
        return self

    def listen(self) -> None:
        """Again, where another library put its own handlers in the place of these."""
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def __exit__(self, *_: object) -> None:
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        self.stopped_early = self.stopped_early or self.stop is None
        if self.stop is not None:
            self.stop()
        if self._task is not None and (self._asked or self.stop is None):
            self._task.cancel()
        self._asked = True


async def _train(stack: AsyncExitStack, config: TrainConfig, claim: Claim, inputs: Inputs, signals: "_Signals") -> None:
    from trainer.health import HealthServer
    from trainer.loop import TrainingLoop

    checkpoint = inputs.checkpoint
    await claim.board.register_run(config.fleet, config.run)
    await claim.board.attach(config.fleet, config.run, claim.token)
    if checkpoint is not None:
        log.info("resuming", step=checkpoint.state.step, checkpoint=str(checkpoint.directory))
        await claim.queue.settle(claim.token, checkpoint.state.settled_ids, GroupState.TRAINED)
    policy, reference = await _workers(stack, config, checkpoint)
    parts = _parts(stack, config, claim, inputs, policy=policy, reference=reference)
    loop = TrainingLoop(config, parts, checkpoint.state if checkpoint else None)
    if config.health_port:
        health = HealthServer(config.health_port, loop.status)
        await health.start()
        stack.push_async_callback(health.close)
    signals.stop = loop.stop
    await loop.run()


async def _workers(
    stack: AsyncExitStack, config: TrainConfig, checkpoint: Checkpoint | None
) -> "tuple[RoleGroup, RoleGroup | None]":
    """The policy group, restored, and the reference group where the algorithm needs one."""
    from trainer.policy import PolicySpec
    from trainer.roles import start_policy, start_reference

    model_dir = checkpoint.policy_dir if checkpoint else config.model.path
    spec = PolicySpec(model_dir.resolve(), config.workers, config.optimizer, config.algorithm, config.seed)
    policy = await start_policy(config.workers, spec)
    stack.callback(policy.close)
    if checkpoint is not None:
        await policy.call("load_state", str(checkpoint.directory.resolve()))
    if config.algorithm.kl_coef == 0:
        return policy, None
    reference = await start_reference(config.workers, config.model.path.resolve())
    stack.callback(reference.close)
    return policy, reference


def _parts(
    stack: AsyncExitStack,
    config: TrainConfig,
    claim: Claim,
    inputs: Inputs,
    *,
    policy: "RoleGroup",
    reference: "RoleGroup | None",
) -> "Parts":
    from trainer.feeder import Feeder
    from trainer.journal import Journal
    from trainer.loop import Parts
    from trainer.metrics import MetricsLog
    from trainer.publish import Publisher, canary_sequences

    journal, metrics = Journal(config.run_dir / "journal.jsonl"), MetricsLog(config.run_dir)
    stack.callback(journal.close)
    stack.callback(metrics.close)
    push = config.push
    publisher = Publisher(
        board=claim.board,
        fleet=config.fleet,
        run=config.run,
        token=claim.token,
        policy_name=config.model.name,
        policy=policy,
        weights_dir=config.run_dir / "weights",
        config=push,
        canary=canary_sequences(
            [p.prompt_ids for p in inputs.prompts[:256]], sequences=push.canary_sequences, tokens=push.canary_tokens
        ),
    )
    cursor = inputs.checkpoint.state.data_cursor if inputs.checkpoint else 0
    return Parts(
        queue=claim.queue,
        token=claim.token,
        policy=policy,
        reference=reference,
        publisher=publisher,
        feeder=Feeder(claim.queue, inputs.prompts, config, cursor=cursor),
        journal=journal,
        checkpoints=inputs.checkpoints,
        metrics=metrics,
        eval_prompts=inputs.eval_prompts,
    )


def main() -> int:
    """`python -m trainer.daemon CONFIG.json`: a resolved configuration, as written beside every run."""
    try:
        return run(TrainConfig.model_validate_json(Path(sys.argv[1]).read_text()))
    except Fenced as error:
        print(f"another trainer took the run over: {error}", file=sys.stderr)
        return 3
    except (NightshiftError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
