"""A replica that users and rollouts share is killed in the middle of a push: users of the other notice nothing, the new
version arrives there, and who comes in the victim's place has it before its first rollout.
"""

import asyncio
from pathlib import Path

import pytest

from rollout.client import RolloutClient
from tests.killed_push import delivered, healthy, hurt, interrupted_push, trainer, users
from tests.running_fleet import run_fleet

pytestmark = pytest.mark.timeout(1500)

_GROUPS = 120


async def test_a_replica_that_users_share_is_killed_between_invitation_and_bytes(tmp_path: Path) -> None:
    with run_fleet(tmp_path, min_replicas=2) as fleet, RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            victim, other = sorted(await healthy(pusher, count=2), key=lambda beat: beat.replica)
            rollout = client.submit([f"p{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 60}).id
            await pusher.beat_where(lambda beat: beat.replica == victim.replica and beat.seats_rollouts > 0)
            with users(fleet, fleet.config.model.name, count=2) as asking:
                await asyncio.sleep(1)
                await interrupted_push(pusher, victim, replicas=2)
                await healthy(pusher, lambda beat: beat.replica == other.replica and beat.version == 1)
                known = {victim.replica, other.replica}
                (successor,) = await healthy(pusher, lambda beat: beat.replica not in known)
                assert successor.version == 1
                assert await delivered(client, rollout) == _GROUPS
            assert [answer for user in asking for answer in hurt(user.answers, pusher.killed_at)] == []
            assert sum(len(user.answers) for user in asking) > 50
