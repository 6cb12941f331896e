"""Groups a second through the queue's whole life against raw pipelined Redis on the same server (fsync always).

The queue arm submits, leases, completes, leases as experience and settles. The raw arm sends what the server executed
for that: as many commands a group and as many bytes, plain and pipelined in batches of the same size, so the difference
is what codec, scripts, round trips and checks cost. The bare arm sends one XADD a payload and no more: what Redis could
take if nothing had to be known of a group but its bytes.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from deploy.embedded_redis import EmbeddedRedis
from rollout.codec import encode_group, encode_request
from rollout.config import RedisConfig
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import (
    FinishReason,
    Group,
    GroupState,
    Purpose,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)

BATCH = 32
_NOT_WORK = frozenset({"info", "config", "evalsha", "eval", "script", "client", "ping", "hello", "auth", "select"})
_CHECKS = frozenset({"hlen", "scard", "xlen", "zcard"})
"""Of what kind a key is; the raw arm is to move groups, not to look whether it may."""


def measure(*, groups: int = 2048, rounds: int = 3) -> dict[str, Any]:
    """Interleaved rounds of both arms."""
    return asyncio.run(_measure(groups, rounds))


async def _measure(groups: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ns-bench-") as directory:
        async with EmbeddedRedis(Path(directory)) as server:
            store = await RedisStore.connect(RedisConfig(url=server.url))
            try:
                return await _rounds(store, groups, rounds)
            finally:
                await store.close()


async def _rounds(store: RedisStore, groups: int, rounds: int) -> dict[str, Any]:
    request, group = example(samples=8, prompt_tokens=16, response_tokens=13)
    queue_rates, raw_rates, bare_rates, per_group = [], [], [], 0.0
    for number in range(rounds):
        before = await _calls(store)
        queue_rates.append(await _queue_round(RedisQueue(store, f"bench-{number}"), request, group, groups))
        per_group = (await _calls(store) - before) / groups
        payloads = (encode_request(request), encode_group(group))
        raw_rates.append(await _raw_round(store, f"raw-{number}", payloads, round(per_group), groups))
        bare_rates.append(await _raw_round(store, f"bare-{number}", payloads, len(payloads), groups))
    return {
        "durability": store.durability(),
        "groups": groups,
        "commands_per_group": per_group,
        "queue_groups_s": queue_rates,
        "raw_groups_s": raw_rates,
        "bare_groups_s": bare_rates,
        "ratio": median(queue_rates) / median(raw_rates),
        "ratio_to_bare": median(queue_rates) / median(bare_rates),
    }


async def _queue_round(queue: RedisQueue, request: RolloutRequest, group: Group, groups: int) -> float:
    token = await queue.acquire_writer("bench", ttl_s=60)
    await queue.set_gate(token, groups=2 * groups, max_age=1)
    started = time.perf_counter()
    for _ in range(groups // BATCH):
        await queue.submit([request] * BATCH)
        leases = await queue.lease("bench", count=BATCH, lease_s=30, purposes=[Purpose.TRAIN])
        await asyncio.gather(*(queue.complete(lease, group) for lease in leases))
        experience = await queue.lease_experience(token, count=BATCH)
        await queue.settle(token, [e.group_id for e in experience], GroupState.TRAINED)
    elapsed = time.perf_counter() - started
    if (ledger := await queue.ledger()).trained != groups:
        raise RuntimeError(f"{ledger} after {groups} groups")
    return groups / elapsed


async def _raw_round(
    store: RedisStore, key: str, payloads: tuple[bytes, bytes], commands_per_group: int, groups: int
) -> float:
    one: list[Sequence[str | bytes]] = [("XADD", key, "*", "b", payload) for payload in payloads]
    one += [("HINCRBY", f"{key}:counts", "field", "1")] * (commands_per_group - len(payloads))
    started = time.perf_counter()
    for _ in range(groups // BATCH):
        await store.commands(one * BATCH)
    return groups / (time.perf_counter() - started)


async def _calls(store: RedisStore) -> int:
    """Commands the server executed so far, those inside scripts included."""
    statistics = await store.command("INFO", "commandstats")
    return sum(
        int(entry["calls"])
        for name, entry in statistics.items()
        if name.removeprefix("cmdstat_").split("|")[0].lower() not in _NOT_WORK | _CHECKS
    )


def example(*, samples: int, prompt_tokens: int, response_tokens: int) -> tuple[RolloutRequest, Group]:
    """A train request and a scored group of the demo's size."""
    prompt = tuple(range(3, 3 + prompt_tokens))
    segment = Segment(
        prompt_ids_P=np.asarray(prompt, dtype=np.int32),
        response_ids_T=np.full(response_tokens, 7, dtype=np.int32),
        behavior_logprobs_T=np.full(response_tokens, -0.5, dtype=np.float32),
        version_spans=(VersionSpan(1, 0, response_tokens),),
        loss_mask_T=np.ones(response_tokens, dtype=np.uint8),
        finish_reason=FinishReason.STOP,
    )
    request = RolloutRequest(
        prompt_ids=prompt,
        prompt_text="doorlike ->\n",
        n=samples,
        sampling=Sampling(max_tokens=response_tokens),
        reward=RewardSpec("reasoning_gym", {"dataset": "spell_backward"}),
    )
    group = Group(
        samples_G=(Sample((segment,), "ekilrood"),) * samples,
        rewards_G=(1.0,) * samples,
        breakdown_G=({},) * samples,
        replica="bench",
        timings=Timings(0.0, 0.1, 0.01),
    )
    return request, group
