"""The gateway's loop that lends: whom it chooses, and that an epoch change does not call all back."""

import asyncio
import time
from dataclasses import replace

import pytest

from rollout.board import Heartbeat, ReplicaRole, ReplicaState
from rollout.errors import StoreUnavailable
from rollout.types import Purpose
from services.lender import chosen
from tests.lender_stand import Stand, a_stand
from tests.queue_records import a_request
from tests.unit.gateway_kit import beat, until


async def test_replicas_that_users_leave_are_lent_after_a_while_and_called_back_at_once() -> None:
    stand = await a_stand()
    assert await stand.pass_time(10) == 0
    assert await stand.pass_time(2) == 3
    stand.users = 17
    assert await stand.pass_time(1) < 2
    recalled = stand.wishes.now
    assert recalled is not None
    assert set(recalled.decided_at.values()) >= {stand.now}


async def test_nothing_is_lent_without_work_nor_outside_of_the_calendar() -> None:
    assert await Stand().pass_time(60) == 0
    day = {"start": "08:00", "end": "20:00", "replicas": 2}
    stand = await a_stand(calendar=[day])
    assert await stand.pass_time(60) == 0
    stand.now += 9 * 3600
    assert await stand.pass_time(60) == 2


async def test_no_more_are_lent_than_the_calendar_leaves_for_long_enough() -> None:
    soon = {"start": "00:00", "end": "00:02", "replicas": 3}
    stand = await a_stand(calendar=[soon, {"start": "00:02", "end": "06:00", "replicas": 1}], min_gain=3, switch_s=30)
    assert await stand.pass_time(14) == 1
    assert await stand.pass_time(300) == 1


async def test_nothing_is_lent_for_groups_that_no_replica_would_lease() -> None:
    stand = Stand()
    await stand.queues["killed"].submit([replace(a_request(), purpose=Purpose.TRAIN)])
    assert await stand.pass_time(60) == 0
    await stand.queues["killed"].submit([replace(a_request(), purpose=Purpose.EVAL)])
    assert await stand.pass_time(60) == 3
    barred = Stand(purposes=("train",))
    await barred.queue.submit([replace(a_request(), purpose=Purpose.COLLECT)])
    assert await barred.pass_time(60) == 0
    await barred.queue.submit([replace(a_request(), purpose=Purpose.TRAIN)])
    assert await barred.pass_time(60) == 3


async def test_without_a_version_to_follow_the_model_as_loaded_works_for_every_run() -> None:
    stand = Stand()
    stand.board.attached = None
    await stand.queues["killed"].submit([replace(a_request(), purpose=Purpose.TRAIN)])
    assert await stand.pass_time(60) == 3


async def test_who_does_not_lead_wishes_nothing_and_a_new_leader_calls_nobody_back() -> None:
    stand = await a_stand()
    assert await stand.pass_time(30) == 3
    other, first = stand.gateway(), stand.wishes.now
    await other.tick()
    assert stand.wishes.now is first
    stand.wishes.leader = ""
    await other.tick()
    assert stand.wishes.now is not None
    assert (stand.wishes.now.epoch, stand.wishes.now.lent) == (2, first.lent if first else None)


async def test_a_request_for_many_sequences_counts_as_so_many() -> None:
    stand = await a_stand()
    stand.users = 2
    stand.board.replicas_alive = [beat("a", seats_users=20), *(beat(name) for name in "bcd")]
    assert await stand.pass_time(60) == 0
    stand.board.replicas_alive = [beat("a", seats_users=2), *(beat(name) for name in "bcd")]
    assert await stand.pass_time(120) == 3


async def test_no_more_are_lent_while_those_that_are_have_seats_to_spare() -> None:
    stand = await a_stand(calendar=[{"start": "00:00", "end": "12:00", "replicas": 1}])
    assert await stand.pass_time(12) == 1
    (lent,) = stand.lender.lent
    stand.lender._lending = stand.lender._lending.model_copy(update={"calendar": ()})

    def holding(seats: int) -> list[Heartbeat]:
        harvests = beat(lent, ReplicaRole.ROLLOUT, seats_rollouts=seats)
        return [harvests, *(beat(name) for name in "abcd" if name != lent)]

    stand.board.replicas_alive = holding(2)
    assert await stand.pass_time(120) == 1
    stand.board.replicas_alive = holding(8)
    assert await stand.pass_time(60) == 3


async def test_a_clock_that_is_set_back_delays_nothing() -> None:
    stand = await a_stand()
    assert await stand.pass_time(5) == 0
    stand.set_by = -3600.0
    assert await stand.pass_time(7) == 3
    stand.users = 40
    assert await stand.pass_time(1) == 0
    stand.users = 0
    assert await stand.pass_time(150) == 3


async def test_one_that_its_users_do_not_leave_makes_room_for_another_that_is_empty() -> None:
    stand = await a_stand(calendar=[{"start": "00:00", "end": "12:00", "replicas": 1}])
    stand.board.replicas_alive = [beat("a", seats_users=1), beat("b", seats_users=1)]
    assert await stand.pass_time(12) == 1
    assert stand.lender.lent == {"a"}
    stand.board.replicas_alive = [beat("a", ReplicaRole.DRAINING, seats_users=1), beat("b")]
    assert await stand.pass_time(120) == 1
    assert stand.lender.lent == {"a"}
    stand.board.replicas_alive = [beat("a", seats_users=1), beat("b")]
    assert await stand.pass_time(2) == 1
    assert stand.lender.lent == {"b"}


async def test_one_whose_weights_failed_is_not_passed_over_for_another() -> None:
    stand = await a_stand(calendar=[{"start": "00:00", "end": "12:00", "replicas": 1}])
    stand.board.replicas_alive = [beat("a", seats_users=1), beat("b", seats_users=1)]
    await stand.pass_time(12)
    stand.board.replicas_alive = [beat("a", ReplicaRole.ROLLOUT), beat("b", seats_users=2)]
    await stand.pass_time(30)
    stand.board.replicas_alive = [beat("a", seats_users=2), beat("b", seats_users=1)]
    await stand.pass_time(60)
    assert stand.lender.lent == {"a"}


async def test_no_more_seats_are_expected_to_be_full_than_rollouts_may_have() -> None:
    stand = await a_stand()
    busy = [beat("a", ReplicaRole.ROLLOUT, seats_rollouts=4, max_seats=4), *(beat(name) for name in "bcd")]
    stand.board.replicas_alive = busy
    assert await stand.pass_time(60) == 2, "of those that serve one stays with users"


async def test_one_that_serve_stops_is_none_that_others_are_lent_for() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b", state=ReplicaState.RETIRED)]
    assert await stand.pass_time(60) == 0


async def test_none_is_lent_on_account_of_one_that_is_on_its_way_back_to_users() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b", ReplicaRole.RECLAIMING)]
    assert await stand.pass_time(60) == 0
    stand.board.replicas_alive = [beat("a"), beat("b")]
    assert await stand.pass_time(30) == 1


async def test_none_is_lent_on_account_of_one_that_is_not_heard_of() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b")]
    await stand.pass_time(1)
    stand.silent = {"b"}
    assert await stand.pass_time(60) == 0
    stand.silent = set()
    assert await stand.pass_time(30) == 1
    stand.silent = set("ab")
    assert await stand.pass_time(30) == 1, "what is lent stays so"


async def test_lent_ones_are_called_back_when_one_that_serves_falls_silent() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b"), beat("c", ReplicaRole.RECLAIMING)]
    assert await stand.pass_time(30) == 1
    assert stand.lender.lent == {"a"}
    stand.users = 9
    stand.silent = {"b"}
    assert await stand.pass_time(3) == 1
    assert await stand.pass_time(2) == 0


async def test_lent_ones_are_called_back_in_the_same_look_where_users_reach_none_that_serves() -> None:
    stand = await a_stand(quiet_s=0, lend_after_s=0)
    stand.board.replicas_alive = [beat(name) for name in "abc"]
    assert await stand.pass_time(5) == 2
    lent = stand.lender.lent
    (serving,) = set("abc") - lent
    stand.board.replicas_alive = [beat(r, ReplicaRole.ROLLOUT, seats_rollouts=8) for r in lent] + [beat(serving)]
    await stand.pass_time(1)
    stand.silent = {serving}  # killed after a heartbeat that nobody has seen yet
    stand.recall.call()
    await stand.lender.tick()
    assert len(stand.lender.lent) == 1, "one is enough"
    assert await stand.pass_time(30) == 1


async def test_one_that_speaks_again_after_users_found_nobody_is_counted_again() -> None:
    stand = await a_stand(quiet_s=0, lend_after_s=0)
    stand.board.replicas_alive = [beat("a"), beat("b")]
    assert await stand.pass_time(5) == 1
    stand.board.replicas_alive = [beat("a", ReplicaRole.ROLLOUT, seats_rollouts=8), beat("b")]
    await stand.pass_time(1)
    stand.recall.call()
    await stand.lender.tick()
    assert not stand.lender.lent
    stand.board.replicas_alive = [beat("a"), beat("b")]
    assert await stand.pass_time(3) == 1


async def test_the_lender_does_not_wait_for_its_next_look_when_a_request_calls() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b")]
    assert await stand.pass_time(30) == 1
    stand.board.replicas_alive = [beat("a", ReplicaRole.ROLLOUT), beat("b")]
    looks = list[float]()
    look = stand.board.replicas

    async def noted(fleet: str) -> list[Heartbeat]:
        looks.append(time.monotonic())
        return await look(fleet)

    stand.board.replicas = noted  # type: ignore[method-assign]
    running = asyncio.create_task(stand.lender.run())
    await until(lambda: len(looks) == 1)
    stand.recall.call()
    await until(lambda: not stand.lender.lent)
    running.cancel()
    assert looks[1] - looks[0] < 0.45


async def test_requests_may_wait_while_one_can_come_back_and_no_longer() -> None:
    stand = await a_stand()
    for beats, worth in (
        ([beat("a"), beat("b", state=ReplicaState.RESTARTING)], True),
        ([beat("a", state=ReplicaState.DEAD), beat("b", ReplicaRole.RECLAIMING)], True),
        ([beat("a", state=ReplicaState.DEAD), beat("b", state=ReplicaState.RESTARTING)], False),
        ([], False),
    ):
        stand.board.replicas_alive = beats
        await stand.pass_time(1)
        assert stand.recall.worth(119.0) == worth
        assert not stand.recall.worth(120.0)


async def test_what_was_not_heard_while_the_board_was_away_calls_nobody_back() -> None:
    stand = await a_stand()
    stand.board.replicas_alive = [beat("a"), beat("b")]
    assert await stand.pass_time(30) == 1
    async with stand.board_away():
        for _ in range(4):
            stand.now += 1.0
            with pytest.raises(StoreUnavailable):
                await stand.lender.tick()
    stand.silent = {"b"}  # which serves, and is back a moment later than the one that is lent
    assert await stand.pass_time(1) == 1
    assert await stand.pass_time(4) == 0, "and is gone where it is not"


async def test_lent_ones_stay_lent_while_a_board_that_was_away_fills_again() -> None:
    stand = await a_stand()
    assert await stand.pass_time(12) == 3
    everybody = stand.board.replicas_alive
    async with stand.board_away():
        stand.now += 20.0  # beyond the life of a heartbeat
    for there in ([], everybody[:1], everybody):
        stand.board.replicas_alive = there
        assert await stand.pass_time(1) == 3
    stand.board.replicas_alive = everybody[:2]
    assert await stand.pass_time(4) < 3, "who does not come is gone"


async def test_users_who_find_nobody_do_not_wait_for_a_board_that_fills_again() -> None:
    stand = await a_stand()
    assert await stand.pass_time(12) == 3
    async with stand.board_away():
        stand.board.replicas_alive = stand.board.replicas_alive[:2]
    stand.recall.call()
    assert await stand.pass_time(1) < 3


async def test_one_in_the_place_of_a_lent_one_that_is_gone_is_a_new_decision() -> None:
    stand = await a_stand()
    stand.users = 8
    stand.board.replicas_alive = [beat(name) for name in "abcd"]
    assert await stand.pass_time(30) == 1
    stand.board.replicas_alive = [beat(name) for name in "bcd"]
    assert await stand.pass_time(1) == 0
    assert await stand.pass_time(60) == 0, "with 8 users, three are the headroom"


async def test_a_leader_that_finds_no_wish_begins_with_none_lent() -> None:
    stand = await a_stand()
    assert await stand.pass_time(30) == 3
    stand.wishes.leader, stand.wishes.epoch, stand.wishes.now = "", 1, None
    assert await stand.pass_time(1) == 0


async def test_a_replica_that_is_gone_is_not_counted() -> None:
    stand = await a_stand()
    assert await stand.pass_time(30) == 3
    stand.board.replicas_alive = [beat("a"), beat("b", ReplicaRole.BROKEN), beat("c", state=ReplicaState.DEAD)]
    assert await stand.pass_time(1) == 0


def test_one_that_does_not_serve_or_is_silent_is_not_lent_anew() -> None:
    beats = [beat("a", seats_users=3), beat("b"), beat("c", ReplicaRole.RECLAIMING), beat("d", ReplicaRole.ROLLOUT)]
    assert chosen(beats, {"d"}, 4, silent={"b", "d"}) == {"a", "d"}


def test_those_with_the_fewest_users_are_lent() -> None:
    beats = [beat("a", seats_users=3), beat("b", seats_users=1), beat("c", seats_users=2)]
    assert chosen(beats, (), 2) == {"b", "c"}


def test_of_those_without_users_the_oldest_are_lent_since_serve_takes_the_newest_away() -> None:
    beats = [beat("a", started_at=9.0), beat("b", started_at=3.0), beat("c", started_at=5.0)]
    assert chosen(beats, (), 2) == {"b", "c"}


def test_those_that_are_lent_stay_so_and_the_dearest_to_call_back_stay_longest() -> None:
    beats = [
        beat("serving"),
        beat("draining", ReplicaRole.DRAINING, seats_users=1),
        beat("pinned", ReplicaRole.ROLLOUT, seats_rollouts=1, pinned=7),
        beat("busy", ReplicaRole.ROLLOUT, seats_rollouts=9),
        beat("idle", ReplicaRole.ROLLOUT),
    ]
    lent = {"draining", "pinned", "busy", "idle"}
    order = [chosen(beats, lent, count) - chosen(beats, lent, count - 1) for count in range(1, 6)]
    assert order == [{"pinned"}, {"busy"}, {"idle"}, {"draining"}, {"serving"}]


async def test_a_lent_one_whose_engine_stands_still_for_a_moment_stays_lent_and_none_is_lent_anew() -> None:
    stand = await a_stand(calendar=[{"start": "00:00", "end": "12:00", "replicas": 1}])
    assert await stand.pass_time(30) == 1
    (lent,) = stand.lender.lent

    def fleet(role: ReplicaRole) -> list[Heartbeat]:
        others = (beat(name) for name in "abcd" if name != lent)
        return [beat(lent, role, state=ReplicaState.SUSPECT), *others]

    stand.board.replicas_alive = fleet(ReplicaRole.ROLLOUT)
    assert await stand.pass_time(30) == 1
    assert stand.lender.lent == {lent}
    stand.users = 40
    assert await stand.pass_time(1) == 0, "users need it"
    stand.board.replicas_alive, stand.users = fleet(ReplicaRole.SERVING), 0
    assert await stand.pass_time(120) == 1
    assert lent not in stand.lender.lent


async def test_what_went_back_while_the_gateway_was_cut_off_is_lent_by_all_rules_alone() -> None:
    stand = await a_stand()
    assert await stand.pass_time(30) == 3
    async with stand.board_away():
        stand.now += stand.config.lending.wish_s + 1
    stand.wishes.now = None  # its time is over
    assert await stand.pass_time(18) == 0, "within quiet_s"
    assert await stand.pass_time(15) == 3
