import asyncio
import time

import pytest

from rollout.errors import Fenced
from rollout.redis_store import RedisStore
from rollout.redis_wishes import RedisWishes
from rollout.wishes import Wish


@pytest.fixture
def wishes(redis_store: RedisStore) -> RedisWishes:
    return RedisWishes(redis_store)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.time_ns()}"


async def test_one_leads_until_its_time_is_over_and_keeps_its_epoch_while_it_renews(
    wishes: RedisWishes, fleet: str
) -> None:
    assert await wishes.lead(fleet, "one", ttl_s=30) == 1
    assert await wishes.lead(fleet, "other", ttl_s=30) is None
    assert await wishes.lead(fleet, "one", ttl_s=0.3) == 1
    await asyncio.sleep(0.4)
    assert await wishes.lead(fleet, "other", ttl_s=30) == 2
    assert await wishes.lead(fleet, "one", ttl_s=30) is None


async def test_a_leader_that_comes_back_late_can_not_wish_any_more(wishes: RedisWishes, fleet: str) -> None:
    old = await wishes.lead(fleet, "one", ttl_s=0.01)
    await asyncio.sleep(0.05)
    new = await wishes.lead(fleet, "other", ttl_s=30)
    assert (old, new) == (1, 2)
    wish = Wish(2, frozenset({"b", "a"}), {"a": 5.5})
    await wishes.wish(fleet, wish, ttl_s=30)
    with pytest.raises(Fenced, match="epoch 1"):
        await wishes.wish(fleet, Wish(1, frozenset({"c"})), ttl_s=30)
    assert await wishes.wished(fleet) == wish


async def test_a_wish_ends_by_itself_and_the_newest_counts(wishes: RedisWishes, fleet: str) -> None:
    assert await wishes.wished(fleet) is None
    assert await wishes.lead(fleet, "one", ttl_s=30) == 1
    await wishes.wish(fleet, Wish(1, frozenset({"a"})), ttl_s=30)
    await wishes.wish(fleet, Wish(1, frozenset()), ttl_s=0.1)
    assert await wishes.wished(fleet) == Wish(1, frozenset())
    await asyncio.sleep(0.2)
    assert await wishes.wished(fleet) is None


async def test_nobody_wishes_who_never_led(wishes: RedisWishes, fleet: str) -> None:
    with pytest.raises(Fenced):
        await wishes.wish(fleet, Wish(1, frozenset()), ttl_s=30)
