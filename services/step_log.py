"""What a vLLM engine says of itself after each step."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_STEPS = 2048
"""Remembered: more than fill half a second on the fastest engine."""
_EVIDENCE_S = 0.5
"""A mean is taken over so long at least: of a few short steps one with a prefill would be all of it."""
_FRESH_S = 1.0
"""A step that ended longer ago says nothing of now."""


class StepLog:
    """A stat logger of vLLM, by its interface (`vllm.v1.metrics.loggers`): called in the engine client's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.steps = 0
        """Since the start, those that only read a part of a prompt too."""
        self.kv_usage = 0.0
        """Share of the KV cache in use."""
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_STEPS)

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        """After one step of the engine."""
        if scheduler_stats is not None:
            self.steps += 1
            self.kv_usage = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is not None and (gaps := iteration_stats.inter_token_latencies_iter):
            # those of sequences that were left out of the step before span it too
            self._gaps.append((self._clock(), min(gaps)))

    def step_s(self, since: float) -> float | None:
        """Mean time between two tokens of a sequence that is in every step, of the newest steps that fill half a second
        and began after `since`, by the clock; None where there are not so many."""
        if not self._gaps or self._gaps[-1][0] < self._clock() - _FRESH_S:
            return None
        total = 0.0
        for count, (at, gap) in enumerate(reversed(self._gaps), start=1):
            if at - gap < since:
                return None
            total += gap
            if total >= _EVIDENCE_S:
                return total / count
        return None

    def log(self) -> None:
        """Nothing to write."""

    def log_engine_initialized(self) -> None:
        """Nothing to write."""

    def record_sleep_state(self, *_: object) -> None:
        """Engines do not sleep here."""

    def record_admission_rejection(self, *_: object) -> None:
        """The gateway bounds users before the engine does."""
