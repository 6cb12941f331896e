"""Harvested tok/s against raw `AsyncLLM` tok/s: the same engine in the same process, rounds interleaved.

The raw arm hands every sample to vLLM at once. The harvested arm is everything a replica does: lease from a real Redis
(fsync always), seats, generation with logprobs and version spans, rewards in their process, complete.
"""

import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import RedisConfig, RewardsConfig
from rollout.queue import RolloutQueue
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose, RewardSpec, RolloutRequest, Sampling
from services.config import EngineConfig, HarvestConfig
from services.engine_arguments import engine_arguments

SEATS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round generates."""

    name: str
    model: Path
    dtype: Literal["float32", "bfloat16"]
    groups: int
    n: int
    max_tokens: int
    rounds: int


class _Fleet:
    """A replica with verified weights and one run."""

    def __init__(self, queue: RolloutQueue) -> None:
        self._queue = queue

    def queues(self) -> Sequence[RolloutQueue]:
        return [self._queue]

    def purposes(self, _run: str) -> Sequence[Purpose]:
        return (Purpose.COLLECT,)

    version = 0
    pinned: int | None = None
    unchecked: int | None = None

    async def settled(self) -> None:
        return


def measure(workload: Workload, prompts: Path, reward: RewardSpec) -> dict[str, Any]:
    """Run the workload's rounds; tok/s of both arms and their ratio."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return asyncio.run(_measure(workload, prompts, reward))


def engine_options(workload: Workload) -> dict[str, Any]:
    """vLLM's arguments of both arms: those of a replica."""
    config = EngineConfig(dtype=workload.dtype, max_model_len=512, max_num_seqs=SEATS)
    return {"model": str(workload.model), **engine_arguments(config)}


async def _measure(workload: Workload, prompts: Path, reward: RewardSpec) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.step_room import StepRoom
    from services.vllm_engine import VllmEngine

    client = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(workload)))
    engine = VllmEngine(client, StepRoom())
    await engine.set_version(0)
    requests = _requests(workload, prompts, reward, client.get_tokenizer())
    try:
        with tempfile.TemporaryDirectory(prefix="ns-bench-") as directory:
            async with EmbeddedRedis(Path(directory)) as server:
                return await _rounds(workload, engine, client, requests, server.url)
    finally:
        client.shutdown()


async def _rounds(
    workload: Workload, engine: Any, client: Any, requests: list[RolloutRequest], url: str
) -> dict[str, Any]:
    from services.reward_pool import RewardPool

    store = await RedisStore.connect(RedisConfig(url=url))
    pool = RewardPool(RewardsConfig())
    raw, harvested = [], []
    try:
        for number in range(workload.rounds + 1):
            mine = requests[2 * number * workload.groups : 2 * (number + 1) * workload.groups]
            raw_rate = await raw_round(client, mine[: workload.groups])
            queue = RedisQueue(store, f"bench-{number}")
            rate = await _harvested_round(engine, pool, queue, mine[workload.groups :])
            if number:  # the first round warms both arms up
                raw.append(raw_rate)
                harvested.append(rate)
    finally:
        await pool.close()
        await store.close()
    return {
        "samples": workload.groups * workload.n,
        "max_tokens": workload.max_tokens,
        "dtype": workload.dtype,
        "seats": SEATS,
        "raw_tok_s": raw,
        "harvested_tok_s": harvested,
        "ratio": median(harvested) / median(raw),
    }


async def raw_round(client: Any, requests: Sequence[RolloutRequest]) -> float:
    """tok/s of vLLM alone on the same samples with the same sampling settings."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    async def one(request: RolloutRequest) -> int:
        parameters = SamplingParams(
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        tokens = 0
        async for output in client.generate(prompt, parameters, uuid.uuid4().hex):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    started = time.perf_counter()
    tokens = await asyncio.gather(*(one(r) for r in requests for _ in range(r.n)))
    return sum(tokens) / (time.perf_counter() - started)


async def _harvested_round(engine: Any, pool: Any, queue: RolloutQueue, requests: Sequence[RolloutRequest]) -> float:
    """From the first lease until every group is delivered."""
    from services.harvester import Harvester
    from services.seats import Seats

    await queue.submit(requests)
    config = HarvestConfig(user_reserve=0)
    harvester = Harvester(
        replica="bench",
        config=config,
        seats=Seats(SEATS, pace=config.prefill_tokens),
        engine=engine,
        rewards=pool,
        fleet=_Fleet(queue),
    )
    started = time.perf_counter()
    running = asyncio.create_task(harvester.run())
    while (await queue.ledger()).pending:  # noqa: ASYNC110 (the queue has no event for this)
        await asyncio.sleep(0.01)
    elapsed = time.perf_counter() - started
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    ledger = await queue.ledger()
    if ledger.delivered != len(requests):
        raise RuntimeError(f"{ledger} after {len(requests)} groups")
    return harvester.tally.generated / elapsed


def _requests(workload: Workload, prompts: Path, reward: RewardSpec, tokenizer: Any) -> list[RolloutRequest]:
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    needed = 2 * (workload.rounds + 1) * workload.groups
    sampling = Sampling(max_tokens=workload.max_tokens)
    return [
        RolloutRequest(
            prompt_ids=tuple(tokenizer.encode(line["prompt"])),
            prompt_text=line["prompt"],
            n=workload.n,
            sampling=sampling,
            reward=reward,
            purpose=Purpose.COLLECT,
            metadata={key: value for key, value in line.items() if key != "prompt"},
        )
        for line in lines[:needed]
    ]
