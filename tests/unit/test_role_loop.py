"""A replica follows the wish with an engine that computes what was loaded last."""

import asyncio
import time
from pathlib import Path

import pytest

from rollout.board import ReplicaRole
from rollout.wishes import Wish
from services.role_loop import LendingImpossible
from services.roles import RESTORES
from services.swap import EngineBroken
from tests.role_stand import IDS, POLICY, PRODUCTION, Stand, lent, ready


async def test_the_whole_way_round_with_the_right_weights(tmp_path: Path) -> None:
    stand = await lent(tmp_path)
    assert (stand.engine.holds, stand.reconciler.fit) == (POLICY, True)
    assert stand.loop.log.ended[ReplicaRole.ROLLOUT] == 1
    assert await stand.step() is ReplicaRole.SERVING
    assert (stand.engine.holds, stand.reconciler.following) == (PRODUCTION, False)
    assert stand.loop.log.ended[ReplicaRole.SERVING] == 1
    assert stand.changes == [
        ReplicaRole.DRAINING,
        ReplicaRole.ROLLOUT,
        ReplicaRole.RECLAIMING,
        ReplicaRole.SERVING,
    ]


async def test_a_replica_that_was_never_lent_waits_for_no_version(tmp_path: Path) -> None:
    stand = await ready(tmp_path)
    await stand.reconciler.step()
    assert (stand.reconciler.following, stand.reconciler.fit, stand.reconciler.detail) == (False, True, "")


async def test_a_wish_for_others_changes_nothing(tmp_path: Path) -> None:
    stand = await ready(tmp_path)
    assert await stand.step("other") is ReplicaRole.SERVING


async def test_a_replica_waits_for_its_users_and_takes_them_again_when_it_is_not_wanted_any_more(
    tmp_path: Path,
) -> None:
    stand = await ready(tmp_path)
    with stand.users.hold(1):
        assert await stand.step("r") is ReplicaRole.DRAINING
        assert await stand.step("r") is ReplicaRole.DRAINING
        assert await stand.step() is ReplicaRole.SERVING
    assert stand.engine.loaded == [POLICY, PRODUCTION]


async def test_a_leader_of_a_server_that_lost_its_data_is_followed(tmp_path: Path) -> None:
    stand = await ready(tmp_path)
    await stand.step(epoch=5)
    assert await stand.step("r", epoch=1) is ReplicaRole.DRAINING


async def test_users_get_the_replica_when_the_wish_is_not_heard_for_too_long(tmp_path: Path) -> None:
    stand = await lent(tmp_path, wish_s=10)
    stand.wishes.away = True
    stand.now += 9
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    stand.now += 2
    assert await stand.step("r") is ReplicaRole.SERVING
    assert stand.engine.holds == PRODUCTION


def switches(stand: Stand, to: ReplicaRole) -> list[float]:
    """Seconds from the decision to its end, of those that are no rehearsal."""
    return [s.parts["verified"] for s in stand.loop.log.records if s.to is to and "drained" in s.parts]


async def test_a_reclaim_counts_from_its_own_decision(tmp_path: Path) -> None:
    stand, now = await ready(tmp_path), time.time()
    for _ in range(3):
        await stand.step("r", decided_at=now - 3600)
    assert await stand.step(decided_at=now - 60) is ReplicaRole.SERVING
    (out,), (back,) = (switches(stand, to) for to in (ReplicaRole.ROLLOUT, ReplicaRole.SERVING))
    assert (round(out, -1), round(back, -1)) == (3600, 60)


async def test_a_replica_that_hears_no_decision_does_not_count_its_way_back_from_the_one_that_lent_it(
    tmp_path: Path,
) -> None:
    stand, decided_at = await ready(tmp_path, wish_s=10), time.time() - 3600
    for _ in range(3):
        await stand.step("r", decided_at=decided_at)
    stand.wishes.away = True
    stand.now += 11
    assert await stand.step("r", decided_at=decided_at) is ReplicaRole.SERVING
    (back,) = switches(stand, ReplicaRole.SERVING)
    assert back < 60
    stand.wishes.away = False
    for _ in range(3):
        await stand.step("r", decided_at=decided_at)
    _, again = switches(stand, ReplicaRole.ROLLOUT)
    assert again < 60


async def test_a_policy_that_is_not_what_it_was_is_not_harvested_with(tmp_path: Path) -> None:
    stand = await ready(tmp_path, rest_s=60)
    stand.engine.damaged.add(POLICY)
    assert await stand.step("r") is ReplicaRole.DRAINING
    assert (await stand.step("r"), stand.engine.holds) == (ReplicaRole.SERVING, PRODUCTION)
    assert stand.changes[-3:] == [ReplicaRole.ROLLOUT, ReplicaRole.RECLAIMING, ReplicaRole.SERVING]
    assert stand.loop.log.ended[ReplicaRole.ROLLOUT] == 0
    assert await stand.step("r") is ReplicaRole.SERVING
    stand.now += 61
    assert await stand.step("r") is ReplicaRole.DRAINING
    assert (await stand.step("r"), stand.engine.holds) == (ReplicaRole.SERVING, PRODUCTION)
    stand.now += 61
    assert await stand.step("r") is ReplicaRole.SERVING
    stand.now += 60
    stand.engine.damaged.clear()
    for wanted in (ReplicaRole.DRAINING, ReplicaRole.ROLLOUT, ReplicaRole.ROLLOUT):
        assert await stand.step("r") is wanted
    assert stand.loop.standing.vain == 0


async def test_a_production_model_that_does_not_come_back_is_the_end_of_the_replica(tmp_path: Path) -> None:
    stand = await lent(tmp_path)
    stand.engine.damaged.add(PRODUCTION)
    assert await stand.step() is ReplicaRole.RECLAIMING
    with pytest.raises(EngineBroken, match="did not come back"):
        await stand.step("r")
    assert (stand.role, stand.engine.loaded[-RESTORES:]) == (ReplicaRole.BROKEN, [PRODUCTION] * RESTORES)
    assert "did not come back" in stand.swap.broken


async def test_no_weights_are_swapped_while_a_sample_is_being_generated(tmp_path: Path) -> None:
    stand = await lent(tmp_path)
    sample = stand.seats.ask(prefill=1)
    stepping = asyncio.create_task(stand.step())
    await asyncio.sleep(0.05)
    assert (stand.role, stand.engine.holds) == (ReplicaRole.RECLAIMING, POLICY)
    stand.seats.leave(sample)
    assert await stepping is ReplicaRole.SERVING


async def test_a_sample_that_never_ends_does_not_keep_the_replica_for_ever(tmp_path: Path) -> None:
    stand = await lent(tmp_path, reclaim_s=0.05)
    stand.seats.ask(prefill=1)
    with pytest.raises(EngineBroken, match="expired"):
        await stand.step()


async def test_a_push_that_is_under_way_takes_nothing_of_the_time_to_come_back(tmp_path: Path) -> None:
    stand = await lent(tmp_path, reclaim_s=1.0)
    stand.reconciler._undisturbed.clear()  # as in a delivery
    stepping = asyncio.create_task(stand.step())
    await asyncio.sleep(0.7)
    assert stand.role is ReplicaRole.RECLAIMING
    stand.engine.stuck = asyncio.Event()
    stand.reconciler._undisturbed.set()
    await asyncio.sleep(0.7)
    stand.engine.stuck.set()
    assert await stepping is ReplicaRole.SERVING


async def test_a_lent_replica_whose_weights_are_not_trusted_any_more_goes_back_after_a_while(tmp_path: Path) -> None:
    stand = await lent(tmp_path, enter_s=30, wish_s=600)
    stand.now += 100
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    stand.reconciler._trusted = False
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    stand.now += 29
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    stand.now += 2
    assert await stand.step("r") is ReplicaRole.SERVING
    assert stand.engine.holds == PRODUCTION


async def test_a_wish_that_cannot_be_read_ends_no_replica(tmp_path: Path) -> None:
    stand = await lent(tmp_path, poll_s=0.001, wish_s=10)

    async def unreadable(fleet: str) -> Wish | None:
        stand.now += 1
        raise KeyError("decided_at")

    stand.wishes.wished = unreadable  # type: ignore[method-assign]
    running = asyncio.create_task(stand.loop.run())
    async with asyncio.timeout(10):
        while stand.role is not ReplicaRole.SERVING:  # noqa: ASYNC110 - the loop tells nobody
            await asyncio.sleep(0.01)
    assert not running.done()
    assert stand.engine.holds == PRODUCTION
    running.cancel()


async def test_a_production_model_that_loads_for_too_long_is_not_waited_for_and_its_load_is_not_cut(
    tmp_path: Path,
) -> None:
    stand = await lent(tmp_path, reclaim_s=0.05)
    stand.engine.stuck = asyncio.Event()
    with pytest.raises(EngineBroken, match="expired"):
        await stand.step()
    assert (stand.role, stand.engine.holds) == (ReplicaRole.BROKEN, POLICY)
    stand.engine.stuck.set()
    await asyncio.sleep(0.01)
    assert stand.engine.holds == PRODUCTION


@pytest.mark.parametrize(("limits", "said"), [({"enter_s": 3}, "enter_s=3"), ({"reclaim_s": 4}, "reclaim_s=4")])
async def test_a_swap_that_takes_longer_than_it_may_is_found_before_users_come(
    tmp_path: Path, limits: dict[str, float], said: str
) -> None:
    stand = Stand(tmp_path, **limits)
    load = stand.engine.reload

    async def slow(directory: Path, *, refresh_tied_head: bool = True) -> None:
        stand.now += 4
        await load(directory, refresh_tied_head=refresh_tied_head)

    stand.engine.reload = slow  # type: ignore[method-assign]
    with pytest.raises(LendingImpossible, match=f"lending.{said} is not enough.*took 4 s"):
        await stand.loop.rehearse(IDS)


async def test_an_engine_that_the_way_back_does_not_lead_back_takes_no_users(tmp_path: Path) -> None:
    stand = Stand(tmp_path)

    async def spoilt(directory: Path, *, refresh_tied_head: bool = True) -> None:
        stand.engine.holds = POLICY

    stand.engine.reload = spoilt  # type: ignore[method-assign]
    with pytest.raises(LendingImpossible, match="back the engine is"):
        await stand.loop.rehearse(IDS)
