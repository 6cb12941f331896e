"""Of replicas that load new weights at the same moment, some stand still and the others serve users meanwhile."""

import asyncio

import pytest

from rollout.errors import StoreUnavailable
from services.push_config import PushConfig
from services.turns import Turns


class Table:
    """Of `at_most` turns at once, none of which ends by itself."""

    def __init__(self, at_most: int = 1) -> None:
        self.at_most = at_most
        self.holders: set[str] = set()

    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool:
        if replica not in self.holders and len(self.holders) >= self.at_most:
            return False
        self.holders.add(replica)
        return True

    async def end(self, replica: str) -> None:
        self.holders.discard(replica)


class Unreachable(Table):
    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool:
        raise StoreUnavailable("no answer")

    async def end(self, replica: str) -> None:
        raise StoreUnavailable("no answer")


class Silent(Table):
    """A server that went away: the client goes on trying for a minute."""

    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool:
        await asyncio.sleep(60)
        return True

    async def end(self, replica: str) -> None:
        await asyncio.sleep(60)


def turns(table: Table, replica: str, *, longest_s: float = 5.0) -> Turns:
    return Turns(table, replica, PushConfig(still_share=0.5, watchdog_s=longest_s))


@pytest.mark.parametrize("at_most", [1, 2])
async def test_all_have_their_turn_and_no_more_than_allowed_at_once(at_most: int) -> None:
    table, inside, most, done = Table(at_most), 0, 0, []

    async def load(replica: str) -> None:
        nonlocal inside, most
        async with turns(table, replica).turn():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1
            done.append(replica)

    async with asyncio.timeout(5):
        await asyncio.gather(*(load(replica) for replica in "abcd"))
    assert sorted(done) == list("abcd")
    assert most == at_most
    assert not table.holders


async def test_a_turn_ends_where_the_load_fails() -> None:
    table = Table()
    with pytest.raises(RuntimeError):
        async with turns(table, "a").turn():
            raise RuntimeError("no usable weights")
    assert not table.holders


async def test_a_version_is_not_kept_waiting_by_one_that_never_ends_its_turn() -> None:
    table = Table()
    table.holders.add("hangs")
    async with asyncio.timeout(5), turns(table, "a", longest_s=0.1).turn():
        assert table.holders == {"hangs"}
    assert table.holders == {"hangs"}


@pytest.mark.parametrize("table", [Unreachable(), Silent()])
async def test_a_store_that_does_not_answer_keeps_no_version_waiting(table: Table) -> None:
    async with asyncio.timeout(5):
        async with turns(table, "a", longest_s=0.1).turn():
            pass
