"""What a vLLM engine says of itself after each step."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_STEPS = 256
_FEWEST_STEPS = 3
"""From fewer no mean is taken: one prefill among them would be all of it."""


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
            self._gaps.append((self._clock(), sum(gaps) / len(gaps)))

    def step_s(self, since: float) -> float | None:
        """Mean time between two tokens of a sequence, of the steps that began and ended after `since`, by the clock."""
        found = [gap for at, gap in self._gaps if at - gap >= since]
        return sum(found) / len(found) if len(found) >= _FEWEST_STEPS else None

    def log(self) -> None:
        """Nothing to write."""

    def log_engine_initialized(self) -> None:
        """Nothing to write."""

    def record_sleep_state(self, *_: object) -> None:
        """Engines do not sleep here."""

    def record_admission_rejection(self, *_: object) -> None:
        """The gateway bounds users before the engine does."""
