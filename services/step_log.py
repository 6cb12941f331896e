"""What a vLLM engine says of itself after each step."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.ended import Ended
from services.step_cost import Steps
from services.user_window import RequestTimes

_STEPS = 2048
"""Remembered: more than fill half a second on the fastest engine."""
EVIDENCE_S = 0.5
"""A mean is taken over so long at least: of a few short steps one with a prefill would be all of it."""
_MOST_UNTOLD_S = 0.3
"""What tells of steps may be as late, and then tells of several at once."""
_FRESH_S = 1.0
"""A step that ended longer ago says nothing of now."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """Between a step and the one before."""

    at: float
    """When it ended."""
    seconds: float
    tokens: float
    """Of each sequence, mean."""


class StepLog:
    """A stat logger of vLLM, by its interface (`vllm.v1.metrics.loggers`): called in the engine client's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, own: tuple[str, ...] = ()) -> None:
        """Requests whose names begin as one of `own` are not users'."""
        self._clock = clock
        self._own = own
        self.steps = 0
        """Since the start, those that only read a part of a prompt too."""
        self.kv_usage = 0.0
        """Share of the KV cache in use."""
        self._recorded_at = -math.inf
        self._untold_s = 0.0
        """That have passed, beyond the steps that it was told of."""
        self._gaps: deque[_Gap] = deque(maxlen=_STEPS)
        self._untaken = Steps()
        self.ended = Ended()
        """Users' sequences."""

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        """After one step of the engine."""
        if scheduler_stats is not None:
            self.steps += 1
            self.kv_usage = float(scheduler_stats.kv_cache_usage)
        if iteration_stats is None:
            return
        for finished in iteration_stats.finished_requests:
            name = finished.request_id or ""
            if finished.num_generation_tokens and not name.startswith(self._own):
                self.ended.add(_times(finished, name, self._clock()))
        gaps = iteration_stats.inter_token_latencies_iter
        sequences = len(gaps) + len(iteration_stats.time_to_first_tokens_iter)
        generated = iteration_stats.num_generation_tokens
        shortest = min(self._untold(), min(gaps, default=0.0))
        self._untold_s -= shortest
        if gaps:
            self._gaps.append(_Gap(self._clock(), shortest, max(1.0, generated / sequences)))
        self._untaken += Steps(count=int(bool(gaps)), seconds=shortest, sequences=sequences, tokens=generated)

    def _untold(self) -> float:
        """Seconds that this step may have taken: where all of its sequences sat the steps before out, what lies between
        two of their tokens spans those too."""
        before, self._recorded_at = self._recorded_at, self._clock()
        self._untold_s = min(_MOST_UNTOLD_S, self._untold_s) + self._recorded_at - before
        return self._untold_s

    def take(self) -> Steps:
        """Since it was asked before: those with a further token of a sequence, and all tokens."""
        taken, self._untaken = self._untaken, Steps()
        return taken

    def step_s(self, since: float) -> float | None:
        """Mean time of a step, of the newest that fill half a second and began after `since`, by the clock; None where
        there are not so many."""
        newest = self._newest(since)
        return sum(gap.seconds for gap in newest) / len(newest) if newest else None

    def token_s(self, since: float) -> float | None:
        """Of the same steps the mean time between two tokens of a sequence: speculative decoding brings several a
        step."""
        newest = self._newest(since)
        return sum(gap.seconds for gap in newest) / sum(gap.tokens for gap in newest) if newest else None

    def _newest(self, since: float) -> Sequence[_Gap]:
        """Steps that fill half a second; none where those since then do not."""
        if not self._gaps or self._gaps[-1].at < self._clock() - _FRESH_S:
            return ()
        total, found = 0.0, list[_Gap]()
        for gap in reversed(self._gaps):
            if gap.at - gap.seconds < since:
                return ()
            total += gap.seconds
            found.append(gap)
            if total >= EVIDENCE_S:
                return found
        return ()

    def log(self) -> None:
        """Nothing to write."""

    def log_engine_initialized(self) -> None:
        """Nothing to write."""

    def record_sleep_state(self, *_: object) -> None:
        """Engines do not sleep here."""

    def record_admission_rejection(self, *_: object) -> None:
        """The gateway bounds users before the engine does."""


def _times(finished: Any, name: str, now: float) -> RequestTimes:
    """Of `vllm.v1.metrics.stats.FinishedRequestStats`, right after the last token."""
    first = now - finished.decode_time
    prompt = finished.num_prompt_tokens - max(0, finished.num_cached_tokens)
    arrived = min(first, now - finished.e2e_latency)  # by the wall clock, which may be set
    return RequestTimes(arrived, first, now, finished.num_generation_tokens, prompt, name)
