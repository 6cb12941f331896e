"""A call whose answer was lost is sent again, and has its effect once."""

import pytest

from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.integration.test_queue_redis import assert_exact, key
from tests.queue_records import a_group, a_request

TRAIN = [Purpose.TRAIN]


@pytest.mark.fault("lost reply after a write", "P1")
async def test_a_call_whose_answer_was_lost_has_its_effect_once(redis_store: RedisStore, fault: FaultRow) -> None:
    """The first answer to every script is thrown away and the call sent again, as after a broken connection."""

    class Resending(RedisStore):
        async def script(
            self, name: str, key: str, *args: str | bytes | float, patience_s: float | None = None
        ) -> object:
            await super().script(name, key, *args, patience_s=patience_s)
            return await super().script(name, key, *args, patience_s=patience_s)

    store = await Resending.connect(redis_store.config)
    try:
        queue = RedisQueue(store, "resent")
        submitted = await queue.submit([a_request(i) for i in range(8)])
        assert submitted.created
        fault.fired = True
        leases = await queue.lease("c", count=6, lease_s=30, purposes=TRAIN)
        assert [lease.attempt for lease in leases] == [1] * 6
        for lease in leases[:3]:
            await queue.complete(lease, a_group())
        await queue.release(leases[3], reason="")
        await queue.release(leases[4], reason="", failed=True)
        await queue.reject(leases[5], reason="no")
        token = await queue.acquire_writer("t", ttl_s=30)
        experience = await queue.lease_experience(token, count=2)
        assert len(experience) == 2
        await queue.settle(token, [e.group_id for e in experience], GroupState.TRAINED)
        await queue.release_writer(token)
        ledger = await queue.ledger()
        assert (ledger.accepted, ledger.trained, ledger.experience, ledger.dead, ledger.queued) == (8, 2, 1, 1, 4)
        await assert_exact(queue)
    finally:
        await store.close()


async def test_a_group_that_died_again_meanwhile_is_not_retried_by_a_call_that_is_resent(
    redis_store: RedisStore,
) -> None:
    queue = RedisQueue(redis_store, "retried")
    await queue.submit([a_request()])

    async def rejected() -> str:
        (lease,) = await queue.lease("c", count=1, lease_s=30, purposes=TRAIN)
        await queue.reject(lease, reason="no")
        return lease.group_id

    async def retry() -> object:
        return await redis_store.script("retry", key(queue, "ledger"), "", "the same call", gid)

    gid = await rejected()
    assert await retry() == 1
    assert await rejected() == gid
    assert await retry() == 1
    assert (await queue.ledger()).dead == 1
    await queue.retry(gid)
    assert (await queue.ledger()).queued == 1
    await assert_exact(queue)
