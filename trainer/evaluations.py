"""The held-out evaluations of one session: at its two ends, and beside the steps by a replica held at one version."""

import asyncio
from collections.abc import Sequence

import structlog

from rollout.board import Pin
from rollout.prompts import Prompt
from rollout.queue import RolloutQueue
from trainer.config import TrainConfig
from trainer.evaluate import Evaluation, evaluate
from trainer.holder import Holder
from trainer.metrics import MetricsLog
from trainer.progress import Progress

log = structlog.get_logger(__name__)


class Evaluations:
    """One at a time beside the steps; their records go to the progress and to the metrics."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        queue: RolloutQueue,
        prompts: Sequence[Prompt],
        holder: Holder,
        metrics: MetricsLog,
        token: int,
        progress: Progress,
        stopping: asyncio.Event,
    ) -> None:
        """`token` is the trainer's fencing token; once `stopping` is set nothing is waited for."""
        self._config = config
        self._queue = queue
        self._prompts = prompts
        self._holder = holder
        self._metrics = metrics
        self._token = token
        self._progress = progress
        self._stopping = stopping
        self._beside: asyncio.Task[None] | None = None

    @property
    def due(self) -> bool:
        """Whether to begin one after this step; not while the one before is unfinished."""
        every, step = self._config.evaluation.every, self._progress.step
        idle = (self._beside is None or self._beside.done()) and not self._stopping.is_set()
        return bool(every and step % every == 0 and step < self._config.steps and self._prompts and idle)

    async def begin(self) -> None:
        """Beside the steps, by a replica held at the present version where one can be spared."""
        pin = await self._holder.hold(self._progress.version)
        self._beside = asyncio.create_task(self._held(f"step-{self._progress.step}", pin))

    async def finished(self) -> None:
        """Until the one beside the steps has ended and its replica has caught up, or a stop is asked for."""
        if self._beside is not None and not self._stopping.is_set():
            await self._beside
            await self._holder.rejoined(self._progress.version, patience_s=self._config.push.deadline_s)

    async def now(self, label: str) -> None:
        """Until it has ended, or a stop is asked for. Raises what `evaluate` raises."""
        outcome = await self._unless_stopped(label)
        if outcome is not None:
            self._progress.evaluations.append(outcome.record())
            self._metrics.evaluation(outcome.record())

    async def close(self) -> None:
        """Abandon the one beside the steps."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)

    async def _held(self, label: str, pin: Pin | None) -> None:
        try:
            async with self._holder.holding(pin):
                await self.now(label)
        except Exception as error:  # whatever it is: training does not need the outcome
            totals = self._progress.totals
            totals["failed_evaluations"] = totals.get("failed_evaluations", 0) + 1
            log.warning("an evaluation failed, training goes on", label=label, error=f"{type(error).__name__}: {error}")

    async def _unless_stopped(self, label: str) -> Evaluation | None:
        running = asyncio.create_task(
            evaluate(
                self._queue, self._prompts, self._config, session=self._token, label=label, step=self._progress.step
            )
        )
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
