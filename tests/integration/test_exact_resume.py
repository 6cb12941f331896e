"""A live run that crashed goes on with exactly what its last checkpoint holds, and loses or repeats no group."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import milestone
from rollout.config import RedisConfig
from rollout.errors import StoreUnavailable
from rollout.local_board import LocalBoard
from rollout.memory_queue import MemoryQueue
from rollout.prompts import read_prompts
from rollout.queue import Submission
from rollout.types import (
    FinishReason,
    Group,
    GroupState,
    Purpose,
    RolloutRequest,
    Sample,
    Segment,
    Timings,
    VersionSpan,
)
from tests.killing import kill_at
from tests.tiny_models import build_policy
from tests.trainer_kit import metrics, train_config, write_prompts
from trainer import in_process
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainConfig, WorkersConfig
from trainer.feeder import Feeder
from trainer.in_process import InProcessGroup
from trainer.journal import Journal
from trainer.milestone import Milestone
from trainer.models import Tokenise, load_tokenizer
from trainer.policy import PolicySpec
from trainer.session import Claim, Inputs, train
from trainer.signals import Signals

pytestmark = pytest.mark.usefixtures("single_rank")


class Crash(BaseException):
    """Ends a session where it is, as a kill would."""


class Groups:
    """Starts the policy in this process and keeps hold of it."""

    policy: InProcessGroup

    async def start_policy(self, workers: WorkersConfig, spec: PolicySpec) -> InProcessGroup:
        self.policy = await in_process.start_policy(workers, spec)
        return self.policy

    async def start_reference(self, workers: WorkersConfig, model_dir: Path) -> InProcessGroup:
        return await in_process.start_reference(workers, model_dir)


class LiveRun:
    """One run whose queue and board outlive its sessions, as those of a server do."""

    def __init__(self, config: TrainConfig, *, eval_prompts: int = 0) -> None:
        self.config = config
        self.queue, self.board = MemoryQueue(config.run), LocalBoard()
        self.checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=2)
        self.groups = Groups()
        tokenise = Tokenise(load_tokenizer(config.model.path))
        self._prompts = read_prompts(config.prompts.train, tokenise, max_prompt_tokens=64)
        self._eval_prompts = self._prompts[:eval_prompts]

    async def session(self, stack: AsyncExitStack) -> tuple[Feeder, "asyncio.Task[None]"]:
        """What the daemon does once it has connected; the workers live as long as the stack."""
        token = await self.queue.acquire_writer("trainer", ttl_s=600)
        inputs = Inputs(self._prompts, self._eval_prompts, self.checkpoints, self.checkpoints.newest())
        claim = Claim(self.queue, self.board, token)
        feeder = Feeder(self.queue, self._prompts, self.config, cursor=inputs.cursor)
        signals = Signals()
        training = train(stack, self.config, claim, inputs, signals, feed=feeder, groups=self.groups)
        return feeder, asyncio.create_task(training)


@asynccontextmanager
async def engine(run: LiveRun, purposes: Sequence[Purpose] = (Purpose.TRAIN,)) -> AsyncIterator[None]:
    """Answers with random tokens drawn from torch's own generator, whose state is part of a checkpoint."""

    async def generate() -> None:
        while True:
            for lease in await run.queue.lease("engine", count=2, lease_s=60, purposes=purposes):
                current = await run.board.current(run.config.run)
                await run.queue.complete(lease, a_group(lease.request, current.version if current else 0))
            await asyncio.sleep(0.002)

    task = asyncio.create_task(generate())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def a_group(request: RolloutRequest, version: int) -> Group:
    samples = []
    for _ in range(request.n):
        segment = Segment(
            np.array(request.prompt_ids, np.int32),
            torch.randint(5, 200, (5,)).numpy().astype(np.int32),
            np.full(5, -5.5, np.float32),
            (VersionSpan(version, 0, 5),),
            np.ones(5, np.uint8),
            FinishReason.LENGTH,
        )
        samples.append(Sample((segment,), ""))
    rewards = tuple(torch.rand(request.n).tolist())
    return Group(tuple(samples), rewards, ({},) * request.n, "replica", Timings(0.0, 0.0, 0.0))


def digests(directory: Path) -> dict[str, str]:
    files = [*directory.glob("*.safetensors"), *(directory / "policy").glob("*.safetensors")]
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


async def held(policy: InProcessGroup, directory: Path) -> dict[str, str]:
    """Digests of all that the workers hold."""
    (directory / "policy").mkdir(parents=True)
    await policy.call("export", str(directory / "policy"), 1 << 28, ())
    await policy.call("save_state", str(directory))
    return digests(directory)


@pytest.fixture
def run(tmp_path: Path) -> LiveRun:
    model = build_policy(tmp_path / "model", "qwen3_tied")
    return LiveRun(train_config(tmp_path, RedisConfig(), "live", model, steps=8))


async def until_crash(run: LiveRun, at: Milestone, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise Crash

    async with AsyncExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(milestone, "observer", kill_at(at, count, crash))
            async with engine(run):
                _, training = await run.session(stack)
                with pytest.raises(Crash):
                    await training


def newest(run: LiveRun) -> Checkpoint:
    checkpoint = run.checkpoints.newest()
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize(
    ("at", "count", "step"),
    [(Milestone.UPDATED, 5, 3), (Milestone.CHECKPOINT_RENAMED, 2, 6), (Milestone.VERSION_WRITTEN, 9, 6)],
)
async def test_a_live_run_resumes_with_the_weights_optimizer_rng_and_cursor_of_its_checkpoint(
    run: LiveRun, at: Milestone, count: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = torch.get_rng_state()
    await until_crash(run, at, count, monkeypatch)
    checkpoint = newest(run)
    assert checkpoint.state.step == step
    wanted = digests(checkpoint.directory)
    assert {"optimizer.safetensors", "rng-00000.safetensors", "policy/model.safetensors"} <= set(wanted)
    torch.set_rng_state(fresh)

    def crash() -> None:
        raise Crash

    async with AsyncExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(milestone, "observer", kill_at(Milestone.VERSION_WRITTEN, 1, crash))
            feeder, training = await run.session(stack)
            assert feeder.cursor == checkpoint.state.data_cursor > 0
            with pytest.raises(Crash):
                await training
        assert await held(run.groups.policy, run.config.runs_dir / "held") == wanted
    published = max((run.config.run_dir / "weights").glob("v*"))
    assert digests(published) == {"model.safetensors": wanted["policy/model.safetensors"]}


async def test_a_live_run_that_crashed_loses_and_repeats_no_group(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, count in (
        (Milestone.JOURNALED, 2),
        (Milestone.CHECKPOINT_RENAMED, 1),
        (Milestone.VERSION_CURRENT, 3),
        (Milestone.SETTLED, 1),
    ):
        await until_crash(run, at, count, monkeypatch)
        assert (await run.queue.ledger()).balance == 0
    async with AsyncExitStack() as stack, engine(run):
        _, training = await run.session(stack)
        await training
    journal = Journal(run.config.run_dir / "journal.jsonl")
    journal.close()
    ids = [gid for entry in journal.entries.values() for gid in entry.group_ids]
    assert sorted(journal.entries) == list(range(1, 9))
    assert len(ids) == len(set(ids)) == 8 * run.config.batch_groups
    assert [status and status.state for status in await run.queue.status(ids)] == [GroupState.TRAINED] * len(ids)
    ledger = await run.queue.ledger()
    assert (ledger.balance, ledger.trained) == (0, len(ids))
    versions = [line["published_version"] for line in metrics(run.config.run_dir)]
    assert versions == sorted(set(versions))


def evaluated(tmp_path: Path, every: int) -> LiveRun:
    model = build_policy(tmp_path / "model", "qwen3_tied")
    prompts = {name: write_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
    settings = {"steps": 8, "checkpoint": {"every": 5}, "evaluation": {"every": every}, "prompts": prompts}
    config = train_config(tmp_path, RedisConfig(), "held-out", model, **settings)
    return LiveRun(config, eval_prompts=4)


def summary_of(run: LiveRun) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run.config.run_dir / "summary.json").read_text())
    return summary


async def test_the_last_steps_are_checkpointed_while_nothing_answers_the_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluated(tmp_path, every=6)
    started, settled = asyncio.Event(), asyncio.Event()
    observers = kill_at(Milestone.JOURNALED, 1, started.set), kill_at(Milestone.SETTLED, 2, settled.set)
    monkeypatch.setattr(milestone, "observer", lambda at: [observe(at) for observe in observers])
    async with AsyncExitStack() as stack, engine(run):
        _, training = await run.session(stack)
        async with asyncio.timeout(240):
            async with engine(run, [Purpose.EVAL]):
                await started.wait()
            await settled.wait()
            assert newest(run).state.step == 8
            assert not training.done()
            async with engine(run, [Purpose.EVAL]):
                await training
    summary = summary_of(run)
    assert [one["label"] for one in summary["evaluations"]] == ["start", "step-6", "end"]
    assert summary["failed_evaluations"] == 0


class Refusing(MemoryQueue):
    """Takes no evaluation while training goes on."""

    async def submit(self, *args: Any, idempotency_key: str | None = None, **kwargs: Any) -> Submission:
        if idempotency_key and ":step-" in idempotency_key:
            raise StoreUnavailable("no answer")
        return await super().submit(*args, idempotency_key=idempotency_key, **kwargs)


async def test_evaluations_that_fail_are_counted_and_end_no_run(tmp_path: Path) -> None:
    run = evaluated(tmp_path, every=3)
    run.queue = Refusing(run.config.run)
    async with AsyncExitStack() as stack, engine(run, list(Purpose)):
        _, training = await run.session(stack)
        await training
    summary = summary_of(run)
    assert newest(run).state.step == summary["step"] == 8
    assert [one["label"] for one in summary["evaluations"]] == ["start", "end"]
    assert summary["failed_evaluations"] == 2
