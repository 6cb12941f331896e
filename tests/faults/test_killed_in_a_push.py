"""A replica that users and rollouts share is killed in the middle of a push: users of the other notice nothing, the new
version arrives there, and who comes in the victim's place has it before its first rollout.
"""

from pathlib import Path

import pytest

from rollout.client import RolloutClient
from tests.fault_rows import FaultRow
from tests.fleet_users import LONGEST, Readers, count, failed, users
from tests.killed_replicas import delivered, healthy, segments, trainer, versions
from tests.running_fleet import run_fleet

pytestmark = pytest.mark.timeout(1500)

_GROUPS = 120


@pytest.mark.fault("kill -9 of a replica in a push", "P6")
async def test_a_replica_that_users_share_is_killed_between_invitation_and_bytes(
    tmp_path: Path, fault: FaultRow
) -> None:
    with (
        run_fleet(tmp_path, min_replicas=2, answers=LONGEST) as fleet,
        RolloutClient(fleet.url, fleet.tokens.rollout) as client,
    ):
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
