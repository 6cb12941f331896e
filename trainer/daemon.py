"""The trainer process: claims the run, starts the workers, resumes, trains, and lets go of everything at the end."""

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rollout.durable import write_text
from rollout.errors import ConfigError, Fenced, NightshiftError, WriterBusy
from rollout.local_board import LocalBoard
from rollout.prompts import Prompt, read_prompts
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.replay_queue import ReplayQueue
from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import WorkerDied, WorkerLost
from trainer.feeder import Feeder
from trainer.known_server import check_age, check_server, keep_server
from trainer.ray_session import joined_ray
from trainer.replay import ReplayFeed, canary_prompts, claim_source, open_recording
from trainer.restarts import Restarts
from trainer.run_lock import run_lock
from trainer.session import Claim, Inputs, train
from trainer.signals import Signals, early_stop

if TYPE_CHECKING:
    from trainer.worker_group import GroupStarter

log = structlog.get_logger(__name__)

_RETRY_S = 0.5


def run(config: TrainConfig) -> int:
    """Train until done or stopped by SIGTERM or SIGINT; 0 then. Needs `config.redis.url` or `config.replay`.

    Raises a NightshiftError that says what went wrong (ConfigError, ModelError, StoreUnavailable, ForeignServer,
    OlderServer, WriterBusy, Fenced, RecordingError, CheckpointError, WorkerDied, TrainingDiverged); nothing that was
    started stays.
    """
    os.environ.setdefault("DS_ACCELERATOR", config.workers.device)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return asyncio.run(_session(config) if config.replay is None else _replay(config, config.replay))


async def _session(config: TrainConfig) -> int:
    from trainer.models import Tokenise, load_tokenizer

    tokenise = Tokenise(load_tokenizer(config.model.path))
    prompts = _prompts(config, config.prompts.train, tokenise)
    eval_prompts = _prompts(config, config.prompts.eval, tokenise) if config.prompts.eval else []
    config.run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=config.checkpoint.keep)
    with Signals() as signals, early_stop(signals):
        attempt = partial(_live, config, prompts, eval_prompts, checkpoints, signals)
        await _restarting(attempt, config, checkpoints, signals)
    return 0


async def _restarting(
    attempt: Callable[[], Awaitable[None]], config: TrainConfig, checkpoints: CheckpointStore, signals: Signals
) -> None:
    """Attempt after attempt, each from the newest checkpoint, while workers die and the run still gets on.

    Raises WorkerDied at once where workers do not even start for the first attempt.
    """
    restarts = Restarts(config.max_restarts)
    while True:
        try:
            return await attempt()
        except WorkerDied as error:
            if signals.asked:  # everything that matters is in the checkpoint and the journal
                log.warning("a worker died while the trainer was to stop", reason=str(error))
                return None
            began = isinstance(error, WorkerLost) or restarts.in_a_row > 0
            step = await asyncio.to_thread(checkpoints.newest_step)
            if not began or not restarts.allow(step):
                raise
            log.warning(
                "a worker died or failed: starting all workers again from the newest checkpoint",
                reason=str(error),
                checkpoint_step=step,
                in_a_row=restarts.in_a_row,
                max_restarts=config.max_restarts,
            )


async def _live(
    config: TrainConfig,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    checkpoints: CheckpointStore,
    signals: Signals,
) -> None:
    """Claims the run, resumes and trains; nothing that was started stays. Raises what `run` does, and WorkerLost."""
    async with AsyncExitStack() as stack:
        store = await RedisStore.connect(config.redis, role="trainer")
        stack.push_async_callback(store.close)
        queue, where = RedisQueue(store, config.run), store.config.redacted_url
        await check_server(queue, config.run_dir, where=where)
        stack.enter_context(joined_ray(config))
        claim = await stack.enter_async_context(_claimed(store, config))
        await stack.enter_async_context(run_lock(config.run_dir, patience_s=_patience_s(config)))
        from trainer.ray_groups import RayGroups

        claim_source(config.run_dir, None)
        await keep_server(queue, config.run_dir)
        # Not before both are held: until then an earlier trainer may still write checkpoints and retire older ones.
        checkpoint = await asyncio.to_thread(checkpoints.newest)
        if checkpoint is not None:
            await check_age(queue, config.run_dir, checkpoint.state, where=where)
        inputs = Inputs(prompts, eval_prompts, checkpoints, checkpoint)
        _keep_config(config)
        feed = Feeder(claim.queue, prompts, config, cursor=inputs.cursor)
        await train(stack, config, claim, inputs, signals, feed=feed, groups=RayGroups.of(config))


async def _replay(config: TrainConfig, file: Path) -> int:
    """A session without Redis: the lock on the run's directory is what makes it the only one."""
    from trainer.models import check_directory

    check_directory(config.model.path)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=config.checkpoint.keep)
    with Signals() as signals, early_stop(signals):
        await _restarting(partial(_replayed, config, file, checkpoints, signals), config, checkpoints, signals)
    return 0


async def _replayed(config: TrainConfig, file: Path, checkpoints: CheckpointStore, signals: Signals) -> None:
    from trainer import in_process
    from trainer.models import vocabulary_size

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(run_lock(config.run_dir, patience_s=_patience_s(config)))
        recording = await asyncio.to_thread(open_recording, file)
        stack.callback(recording.close)
        prompts = canary_prompts(recording, vocabulary=vocabulary_size(config.model.path))
        claim_source(config.run_dir, recording.name)
        checkpoint = await asyncio.to_thread(checkpoints.newest)
        inputs = Inputs(prompts, [], checkpoints, checkpoint)
        token = checkpoint.state.fencing_token + 1 if checkpoint else 1
        queue = ReplayQueue(recording, config.run, start=inputs.cursor, token=token)
        log.info("replaying", file=str(file), of_run=recording.name.run, groups=len(recording), at=inputs.cursor)
        _keep_config(config)
        groups: GroupStarter = in_process
        if config.most_ranks > 1:
            from trainer.ray_groups import RayGroups

            stack.enter_context(joined_ray(config))
            groups = RayGroups.of(config)
        claim, feed = Claim(queue, LocalBoard(), token), ReplayFeed(queue, cursor=inputs.cursor)
        await train(stack, config, claim, inputs, signals, feed=feed, groups=groups)


def _keep_config(config: TrainConfig) -> None:
    """As resolved, beside the run; without the login of Redis."""
    shown = config.redis.model_copy(update={"url": config.redis.redacted_url or None})
    resolved = config.model_copy(update={"redis": shown})
    write_text(config.run_dir / "config.json", resolved.model_dump_json(indent=1))


def _prompts(config: TrainConfig, path: Path, tokenise: Callable[..., tuple[Sequence[int], str]]) -> list[Prompt]:
    """Raises ConfigError also where prompt and response cannot fit the model, or it has no row for one of their ids."""
    from trainer.models import context_length, vocabulary_size

    prompts = read_prompts(path, tokenise, max_prompt_tokens=config.prompts.max_prompt_tokens)
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    for model in config.trained_models:
        limit = context_length(model)
        if limit is not None and longest + config.sampling.max_tokens > limit:
            raise ConfigError(
                f"{path}: the longest prompt has {longest} tokens, with sampling.max_tokens="
                f"{config.sampling.max_tokens} that is above the context of {limit} of {model}"
            )
    largest, rows = max(max(prompt.prompt_ids) for prompt in prompts), vocabulary_size(config.model.path)
    if rows is not None and largest >= rows:
        raise ConfigError(
            f"{path}: a prompt has token id {largest}, but {config.model.path} has a vocabulary of {rows}"
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
        body = None  # a claim that turns out to be lost from here on has nothing to end
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
