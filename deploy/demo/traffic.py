"""The demo's users: a light, steady stream of OpenAI requests and one burst, timed on the client's side."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import httpx

from deploy.demo.answer import Answer
from rollout.text_lines import async_text_lines

SETTLING, WITHOUT, WITH, BURST = "settling", "without_rollouts", "with_rollouts", "burst"
"""What requests are filed under. While engines warm up or the trainer starts, they settle and are not compared."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One finished or failed user request."""

    phase: str
    started_at: float
    """Unix seconds."""
    ttft_s: float
    """From sending to the first token."""
    tpot_s: float | None
    """Mean time between tokens after the first; None for answers of one token."""
    longest_gap_s: float
    """Longest wait for any token, the first included."""
    tokens: int
    error: str = ""


class Traffic:
    """Streams short completions and chats from the gateway until it is stopped; every request becomes a Timing."""

    def __init__(self, url: str, token: str, model: str, prompts: Sequence[str], *, max_tokens: int) -> None:
        self.timings: list[Timing] = []
        self.phase = SETTLING
        self.stayed_away: Counter[str] = Counter()
        """Users of `stream`, by phase, who found too many others under way."""
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(60.0),
            trust_env=False,  # the gateway is on this machine: no proxy
        )
        self._model, self._prompts, self._max_tokens = model, prompts, max_tokens
        self._random = random.Random(0)

    async def stream(self, rate: float, *, at_once: int) -> None:
        """Arrivals at `rate` a second on average, whatever became of those before, until cancelled. But who finds
        `at_once` others under way stays away, and is counted: a machine too slow for the rate would fill with users."""
        waiting: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as requests:
            while True:
                if len(waiting) < at_once:
                    waiting.add(user := requests.create_task(self._request(self.phase)))
                    user.add_done_callback(waiting.discard)
                else:
                    self.stayed_away[self.phase] += 1
                await asyncio.sleep(self._random.expovariate(rate))

    async def burst(self, users: int, until: Callable[[], bool], *, limit_s: float) -> None:
        """`users` who ask again as soon as they are answered, until `until()` or the time limit."""
        deadline = time.monotonic() + limit_s

        async def user() -> None:
            while not until() and time.monotonic() < deadline:
                await self._request(BURST)

        async with asyncio.TaskGroup() as crowd:
            for _ in range(users):
                crowd.create_task(user())

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, phase: str) -> None:
        path, body = self._body(self._random.choice(self._prompts))
        started_at, start = time.time(), time.perf_counter()
        try:
            answer = await self._consume(path, body)
            arrivals = answer.arrivals or [time.perf_counter()]
            self.timings.append(timing(phase, started_at, start, arrivals, answer.tokens))
        except (httpx.HTTPError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            self.timings.append(Timing(phase, started_at, 0.0, None, 0.0, 0, detail))
            await asyncio.sleep(0.2)

    def _body(self, prompt: str) -> tuple[str, dict[str, Any]]:
        common = {
            "model": self._model,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._random.random() < 0.5:
            return "/v1/completions", {**common, "prompt": prompt}
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": prompt.removesuffix("\n")}]}

    async def _consume(self, path: str, body: dict[str, Any]) -> Answer:
        """The whole answer. Raises HTTPError or ValueError."""
        answer = Answer()
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"{response.status_code} {(await response.aread()).decode(errors='replace')[:300]}")
            async for line in async_text_lines(response.aiter_bytes()):
                answer.take(line, time.perf_counter())
        answer.check(self._max_tokens)
        return answer


def timing(phase: str, started_at: float, start: float, arrivals: Sequence[float], tokens: int) -> Timing:
    """Latencies of one stream from the arrival times of its chunks (same clock as `start`)."""
    spread = arrivals[-1] - arrivals[0]
    waits = [after - before for before, after in zip([start, *arrivals], arrivals, strict=False)]
    tpot = spread / (tokens - 1) if tokens > 1 and len(arrivals) > 1 else None
    return Timing(phase, started_at, arrivals[0] - start, tpot, max(waits), tokens)


def summary(timings: Sequence[Timing], phase: str) -> dict[str, Any]:
    """Counts and percentiles (seconds) of one phase."""
    mine = [t for t in timings if t.phase == phase]
    good = [t for t in mine if not t.error]
    return {
        "requests": len(mine),
        "failed": len(mine) - len(good),
        "errors": sorted({t.error for t in mine if t.error})[:5],
        "tokens": sum(t.tokens for t in good),
        "ttft_s": _percentiles([t.ttft_s for t in good]),
        "tpot_s": _percentiles([t.tpot_s for t in good if t.tpot_s is not None]),
        "longest_gap_s": max((t.longest_gap_s for t in good), default=None),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if len(values) < 2:
        only = values[0] if values else None
        return {"p50": only, "p95": only}
    cuts = quantiles(values, n=20, method="inclusive")
    return {"p50": cuts[9], "p95": cuts[18]}
