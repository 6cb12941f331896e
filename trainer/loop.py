"""The training loop as a visible state machine.

    starting -> publishing -> evaluating -> [waiting -> stepping -> publishing -> checkpointing]* -> evaluating -> done

Order within a step: journal, then update, then publish; a checkpoint first becomes durable, then what it contains is
settled. Killed anywhere, the next start repeats the journaled steps after the newest checkpoint.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from rollout.durable import write_text
from rollout.milestone import reached
from rollout.prompts import Prompt
from rollout.queue import RolloutQueue
from rollout.types import GroupState
from trainer.batch import FreshGroup
from trainer.checkpoint import CheckpointStore, TrainerState
from trainer.config import TrainConfig
from trainer.errors import TrainingDiverged
from trainer.evaluations import Evaluations
from trainer.feeder import Feed
from trainer.holder import Holder
from trainer.intake import Intake, PolicyLimits, collect, recollect, reject
from trainer.journal import Journal, JournalEntry
from trainer.metrics import MetricsLog, batch_metrics, staleness_metrics
from trainer.milestone import Milestone
from trainer.progress import Phase, Progress
from trainer.publish import Publisher
from trainer.push import PushReport
from trainer.repeat import steps_to_repeat
from trainer.run_status import run_status
from trainer.starvation import Starvation
from trainer.step import Update, update
from trainer.summary import add_step, summarise
from trainer.workers import Workers

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 2.0
"""For a push that is on its way when the trainer is told to stop."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    queue: RolloutQueue
    token: int
    workers: Workers
    publisher: Publisher
    feed: Feed
    journal: Journal
    checkpoints: CheckpointStore
    metrics: MetricsLog
    eval_prompts: Sequence[Prompt]
    holder: Holder
    limits: PolicyLimits


class TrainingLoop:
    """Runs one session of a run."""

    def __init__(self, config: TrainConfig, parts: Parts, restored: TrainerState | None) -> None:
        self.phase = Phase.STARTING
        self.progress = Progress.after(restored)
        self._config = config
        self._parts = parts
        self._starvation = Starvation(parts.queue, limit=config.max_dead_batches * config.batch_groups)
        self._stopping = asyncio.Event()
        self._push: asyncio.Task[PushReport] | None = None
        self._evaluations = Evaluations(
            config,
            queue=parts.queue,
            prompts=parts.eval_prompts,
            holder=parts.holder,
            metrics=parts.metrics,
            token=parts.token,
            progress=self.progress,
            stopping=self._stopping,
        )
        self._first_version = 0
        self._same_weights = {0 if restored is None else self._version()}
        """Versions that name the policy as it is: the model as loaded is 0, and a start publishes what it has anew."""
        self._started = self._stepped = time.monotonic()
        self._last: dict[str, Any] = {}

    def stop(self) -> None:
        """Finish or abandon the present step, checkpoint and return from `run`."""
        self._stopping.set()

    def status(self) -> dict[str, Any]:
        """For /status and /metrics."""
        now = time.monotonic()
        return run_status(
            self._config,
            self.phase,
            self.progress,
            self._last,
            uptime_s=now - self._started,
            step_age_s=now - self._stepped,
        )

    async def run(self) -> None:
        """Until `steps` are done or `stop` was called.

        Raises Fenced, StoreUnavailable, WorkerDied, TrainingDiverged, NothingToTrain, and ConfigError where the fleet
        cannot load what the run publishes.
        """
        feeding = asyncio.create_task(self._parts.feed.run())
        watching = asyncio.create_task(self._parts.publisher.until_misfit(self._waits))
        main = asyncio.create_task(self._run())
        try:
            await asyncio.wait({feeding, watching, main}, return_when=asyncio.FIRST_COMPLETED)
            for beside in (feeding, watching):
                if beside.done():
                    beside.result()
            await main
        finally:
            tasks = [task for task in (feeding, watching, main, self._push) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, self._evaluations.close(), return_exceptions=True)

    def _waits(self) -> bool:
        """For what engines generate; an error that comes then interrupts no step."""
        return self.phase in {Phase.WAITING, Phase.EVALUATING}

    async def _run(self) -> None:
        config, progress = self._config, self.progress
        await self._open_gate()
        await self._publish()
        self._first_version = progress.version
        await self._evaluate_start()
        for entry in await self._to_repeat():
            if progress.step < config.steps and not self._stopping.is_set():
                log.info("repeating a journaled step", step=entry.step)
                await self._step(entry)
        while progress.step < config.steps and not self._stopping.is_set():
            await self._step(None)
        await self._finish()

    async def _to_repeat(self) -> list[JournalEntry]:
        progress = self.progress
        entries, lost = await steps_to_repeat(self._parts.queue, self._parts.journal, after=progress.step)
        if lost:
            progress.totals["lost_steps"] = progress.totals.get("lost_steps", 0) + lost
        return entries

    async def _evaluate_start(self) -> None:
        if not self._wants("start"):
            return
        if self.progress.step == 0:
            await self._pushed()
            await self._evaluate_now("start")

    def _wants(self, label: str) -> bool:
        return bool(self._parts.eval_prompts) and not any(e["label"] == label for e in self.progress.evaluations)

    async def _step(self, entry: JournalEntry | None) -> None:
        began = time.monotonic()
        step, version = self.progress.step + 1, entry.version if entry else self._version()
        self.phase = Phase.WAITING
        intake = await self._intake(entry, version)
        if intake is None:
            return
        waited = time.monotonic()
        self.phase = Phase.STEPPING
        groups = intake.groups
        if entry is None:
            max_age = self._config.staleness.max_age
            entry = intake.entry(step=step, version=version, seed=self._config.seed, max_age=max_age)
            await self._confirm_writer()
            await asyncio.to_thread(self._parts.journal.append, entry)
            reached(Milestone.JOURNALED)
        result = await self._update(groups, step, entry.seed) if groups else Update(False, {})
        reached(Milestone.UPDATED)
        self.progress.step = step
        self._parts.feed.stepped(entry)
        await reject(self._parts.queue, self._parts.token, intake, result.rejected)
        await self._account(intake.groups, step, result)
        stepped = time.monotonic()
        if result.applied:
            self._same_weights = set()
            await self._publish()
            # Only now: what is generated from here on is generated by the version just published.
            await self._open_gate()
        published = time.monotonic()
        record: dict[str, Any] = {
            "step": step,
            "version": version,
            "published_version": self.progress.version,
            "applied": result.applied,
            "time": time.time(),
            "wait_s": waited - began,
            "update_s": stepped - waited,
            "publish_s": published - stepped,
            "step_s": published - began,
            **batch_metrics(result.groups),
            **staleness_metrics(intake),
            **result.metrics,
        }
        add_step(self.progress.totals, record)
        self._last, self._stepped = record, time.monotonic()
        # Before the checkpoint, after which no start would do the step again and write its line.
        self._parts.metrics.step(record)
        await self._checkpoint_if_due()
        await self._evaluate_if_due()

    async def _intake(self, entry: JournalEntry | None, version: int) -> Intake | None:
        config, parts = self._config, self._parts
        if entry is None:
            return await collect(
                parts.queue,
                parts.token,
                batch_groups=config.batch_groups,
                version=version,
                staleness=config.staleness,
                max_filtered=config.max_filtered_groups,
                stall_s=config.stall_s,
                starvation=self._starvation,
                stopped=self._ends,
                limits=parts.limits,
            )
        return await recollect(parts.queue, parts.token, entry, config.staleness, limits=parts.limits)

    def _version(self) -> int:
        """By which the age of samples is judged.

        In a replay the number that an uninterrupted run would have published: those that an interruption used up would
        make it drop other samples than the run that was never killed.
        """
        return self.progress.version if self._config.replay is None else self.progress.updates + 1

    def _ends(self) -> bool:
        """Whether no further batch is to be collected; the end of a recording is a stop."""
        if self._parts.feed.exhausted and not self._stopping.is_set():
            log.info("the recording is used up", step=self.progress.step, steps=self._config.steps)
            self._stopping.set()
        return self._stopping.is_set()

    async def _update(self, groups: Sequence[FreshGroup], step: int, seed: int) -> Update:
        return await update(
            groups,
            step=step,
            seed=seed,
            same_weights=self._same_weights,
            config=self._config,
            workers=self._parts.workers,
        )

    async def _account(self, groups: Sequence[FreshGroup], step: int, result: Update) -> None:
        """Remember trained groups until their checkpoint; end those of a skipped step. Raises TrainingDiverged."""
        ids = [group.experience.group_id for group in groups]
        progress = self.progress
        if result.applied or not (ids or result.rejected):
            progress.unsettled += ids
            progress.skipped_in_a_row = 0 if result.applied else progress.skipped_in_a_row
            return
        progress.skipped_in_a_row += 1
        reason = f"step {step} had {result.skipped}"
        log.warning("step skipped", step=step, reason=reason, in_a_row=progress.skipped_in_a_row)
        await self._parts.queue.settle(self._parts.token, ids, GroupState.DEAD, reason=reason)
        if progress.skipped_in_a_row >= self._config.max_skipped_steps:
            raise TrainingDiverged(
                f"{progress.skipped_in_a_row} steps in a row were skipped, the last because it had {result.skipped}"
                f" (max_skipped_steps={self._config.max_skipped_steps}); the weights are those of step"
                f" {step - progress.skipped_in_a_row}. Lower optimizer.lr or look at the rewards"
            )

    async def _open_gate(self) -> None:
        """Let generation run eta + 1 batches ahead of training.

        To the queue a group is experience until it is settled, which waits for the checkpoint; what is trained already
        must not use up the window.
        """
        unsettled = len(self.progress.unsettled)
        self._parts.feed.unsettled = unsettled
        staleness = self._config.staleness
        groups = (staleness.eta + 1) * self._config.batch_groups + unsettled
        await self._parts.queue.set_gate(self._parts.token, groups=groups, max_age=staleness.max_age)

    async def _publish(self) -> None:
        self.phase = Phase.PUBLISHING
        await self._pushed()
        manifest, self._push = await self._parts.publisher.publish(self.progress.step, above=self.progress.version)
        self.progress.version = manifest.version
        self._same_weights.add(self._version())

    async def _pushed(self) -> None:
        """Wait for the push on its way, and record it; a stop gives it a moment, then replicas take the artefact."""
        if self._push is None:
            return
        push, self._push = self._push, None
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({push, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait({push}, timeout=_STOP_GRACE_S)
        if push.done():
            self._parts.metrics.push(push.result().record())
        else:
            push.cancel()

    async def _checkpoint_if_due(self) -> None:
        due = self.progress.step % self._config.checkpoint.every == 0
        if due and self.progress.step != self.progress.checkpointed_step:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Make the state durable, then settle what it contains."""
        self.phase = Phase.CHECKPOINTING
        began = time.monotonic()
        parts, progress = self._parts, self.progress
        state = TrainerState(
            step=progress.step,
            data_cursor=parts.feed.cursor,
            version=progress.version,
            settled_ids=tuple(progress.unsettled),
            fencing_token=parts.token,
            totals=progress.totals,
            evaluations=tuple(progress.evaluations),
            ledger=asdict(await parts.queue.ledger()),
        )
        await parts.checkpoints.save(state, self._write_checkpoint, self._confirm_writer)
        await parts.queue.settle(parts.token, state.settled_ids, GroupState.TRAINED)
        reached(Milestone.SETTLED)
        progress.checkpointed_step = progress.step
        progress.unsettled = []
        parts.journal.forget(progress.step)
        await self._open_gate()
        spent = progress.totals.get("seconds:checkpoint", 0.0)
        progress.totals["seconds:checkpoint"] = spent + time.monotonic() - began
        await self._write_summary()

    async def _write_checkpoint(self, directory: Path) -> None:
        await self._parts.workers.save(directory, bucket_bytes=self._config.push.bucket_bytes)

    async def _confirm_writer(self) -> None:
        """Raises Fenced."""
        await self._parts.queue.renew_writer(self._parts.token, ttl_s=self._config.writer_ttl_s)

    async def _evaluate_if_due(self) -> None:
        if self._evaluations.due:
            await self._pushed()  # a replica can be held at a version that it has
            await self._evaluations.begin()

    async def _evaluate_now(self, label: str) -> None:
        self.phase = Phase.EVALUATING
        await self._evaluations.now(label)

    async def _finish(self) -> None:
        await self._pushed()
        # Before the evaluation, which takes for ever where no replica is left.
        if self.progress.step != self.progress.checkpointed_step:
            await self._checkpoint()
        self.phase = Phase.EVALUATING
        await self._evaluations.finished()
        complete = self.progress.step >= self._config.steps and not self._stopping.is_set()
        if complete and self._parts.eval_prompts:
            await self._parts.queue.set_gate(self._parts.token, groups=0, max_age=0)
            self.progress.evaluations = [e for e in self.progress.evaluations if e["label"] != "end"]
            await self._evaluate_now("end")
        await self._write_summary()
        self.phase = Phase.DONE

    async def _write_summary(self) -> None:
        progress = self.progress
        summary = summarise(
            run=self._config.run,
            step=progress.step,
            steps=self._config.steps,
            first_version=self._first_version,
            version=progress.version,
            totals=progress.totals,
            evaluations=progress.evaluations,
            pushes=self._parts.metrics.pushes,
            ledger=asdict(await self._parts.queue.ledger()),
            wall_s=time.monotonic() - self._started,
        )
        path = self._config.run_dir / "summary.json"
        await asyncio.to_thread(write_text, path, json.dumps(summary, indent=1))
