"""A replica that users and rollouts share, or its engine alone, is killed in the middle of a push: users of the other
notice nothing, the new version arrives there, and who comes in the victim's place has it before its first rollout.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.client import RolloutClient
from tests.fault_rows import FaultRow
from tests.fleet_users import LONGEST, Readers, count, failed, users
from tests.killed_replicas import EngineKiller, delivered, healthy, segments, trainer, versions
from tests.running_fleet import RunningFleet, run_fleet

pytestmark = pytest.mark.timeout(1500)

_GROUPS = 120


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with run_fleet(tmp_path_factory.mktemp("push"), min_replicas=2, answers=LONGEST) as running:
        yield running


@pytest.mark.fault("kill -9 of a replica in a push", "P6")
async def test_a_replica_that_users_share_is_killed_between_invitation_and_bytes(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            victim, other = sorted(await healthy(pusher, count=2), key=lambda beat: beat.replica)
            readers = Readers(fleet, fleet.config.model.name, pusher.board)
            await readers.begin([victim.replica, other.replica])
            rollout = client.submit([f"p{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 60})
            await pusher.beat_where(lambda beat: beat.replica == victim.replica and beat.seats_rollouts > 0)
            with users(fleet, fleet.config.model.name, since=pusher.death.known) as asking:
                await pusher.interrupted_push(victim, replicas=2)
                await healthy(pusher, lambda beat: beat.replica == other.replica and beat.version == 1)
                known = {victim.replica, other.replica}
                with fault.recovery():
                    (successor,) = await healthy(pusher, lambda beat: beat.replica not in known)
                assert successor.version == 1
                groups = await delivered(fleet, client, rollout)
                later = await delivered(fleet, client, client.submit(["later"], n=4, sampling={"max_tokens": 60}))
            await readers.check_lost(victim.replica, died=pusher.death.at)
            assert failed(asking) == []
            assert count(asking) > 50
            assert all(versions(segment, {0, 1}) for segment in segments(groups))
            assert {tuple(versions(segment, {1})) for segment in segments(later)} == {(1,)}


@pytest.mark.fault("kill -9 of an engine in a push", "P6")
async def test_an_engine_alone_is_killed_between_invitation_and_bytes(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights", EngineKiller) as pusher:
            victim, other = sorted(await healthy(pusher, count=2), key=lambda beat: beat.replica)
            old = other.version
            rollout = client.submit([f"e{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 60})
            await pusher.beat_where(lambda beat: beat.replica == victim.replica and beat.seats_rollouts > 0)
            await pusher.interrupted_push(victim, replicas=2)
            new = (await healthy(pusher, lambda beat: beat.replica == other.replica and beat.version > old))[0].version
            known = {victim.replica, other.replica}
            with fault.recovery():
                (successor,) = await healthy(pusher, lambda beat: beat.replica not in known)
            assert successor.version == new
            groups = await delivered(fleet, client, rollout)
            later = await delivered(fleet, client, client.submit(["later"], n=4, sampling={"max_tokens": 60}))
            assert all(versions(segment, {old, new}) for segment in segments(groups))
            assert {tuple(versions(segment, {new})) for segment in segments(later)} == {(new,)}
