"""A real engine goes from users to rollouts and back: never both, the right weights each time, and no token is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.board import ReplicaRole, ReplicaState
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_wishes import RedisWishes
from rollout.types import Group, GroupState, Sampling
from rollout.weights import version_dir
from rollout.wishes import Wish
from services.config import FleetConfig
from services.rehearsal import canary_ids, independent_logprobs
from services.replica import Replica
from services.swap import mean_gap
from tests.engine_rig import SEATS, Rig, finished, request
from tests.fake_trainer import FakeTrainer
from tests.tiny_models import build_policy

pytestmark = pytest.mark.timeout(900)

LONG = Sampling(max_tokens=200)


@dataclass
class Fleet:
    """One replica that is lent by a wish."""

    rig: Rig
    config: FleetConfig
    replica: Replica
    trainer: FakeTrainer
    queue: RedisQueue
    wishes: RedisWishes

    async def wish(self, *, lent: bool, ttl_s: float = 60.0) -> None:
        epoch = await self.wishes.lead(self.config.fleet, "test", ttl_s=60)
        assert epoch is not None
        names = frozenset({self.replica.name} if lent else ())
        await self.wishes.wish(self.config.fleet, Wish(epoch, names), ttl_s=ttl_s)

    async def until(self, role: ReplicaRole, state: ReplicaState = ReplicaState.HEALTHY) -> None:
        await until(lambda: (self.replica.role, self.replica.health.now().state) == (role, state))

    async def computes(self, model: Path) -> float:
        """Nats between what the engine computes now and what the model's files say."""
        ids = canary_ids(64)
        found = [await self.rig.engine.score(row) for row in ids]
        return mean_gap(found, independent_logprobs(model, ids))


async def until(condition: Callable[[], bool], *, timeout_s: float = 240.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  the state under test announces nothing
            await asyncio.sleep(0.005)


def sampled_by(model: Path, group: Group) -> None:
    """Every token has the logprob that the model's files give it."""
    for sample in group.samples_G:
        (segment,) = sample.segments
        ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
        expected = independent_logprobs(model, (ids,))[0][len(segment.prompt_ids_P) - 1 :]
        assert segment.behavior_logprobs_T == pytest.approx(expected, abs=1e-3)


@asynccontextmanager
async def lending(rig: Rig, name: str, **changes: object) -> AsyncIterator[Fleet]:
    production = rig.tmp / "production"
    if not production.exists():
        build_policy(production, "qwen2_tied", seed=11)
    config = rig.lending(name, production)
    config = config.model_copy(update={"lending": config.lending.model_copy(update=changes)})
    store = await RedisStore.connect(rig.redis)
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        yield Fleet(rig, config, replica, trainer, queue, RedisWishes(store))
    await store.close()


async def test_a_replica_is_lent_and_comes_back_with_the_right_weights_each_time(rig: Rig) -> None:
    async with lending(rig, "round") as fleet:
        replica, model = fleet.replica, fleet.rig.model
        assert (replica.role, replica.takes_users, replica.purposes(fleet.config.run)) == (
            ReplicaRole.SERVING,
            True,
            (),
        )
        submission = await fleet.queue.submit([request()])
        assert await fleet.computes(fleet.config.served.path) < 0.01
        assert await fleet.computes(model) > 0.2

        await fleet.wish(lent=True)
        (group,) = await finished(fleet.queue, submission.group_ids)
        assert {span.version for s in group.samples_G for span in s.segments[0].version_spans} == {0}
        sampled_by(model, group)
        assert await fleet.computes(model) < 0.01

        manifest = await fleet.trainer.publish()
        await fleet.trainer.make_current(manifest)
        await until(lambda: replica.version == manifest.version)
        assert await fleet.computes(version_dir(fleet.trainer.weights, manifest.version)) < 0.01

        await fleet.wish(lent=False)
        await fleet.until(ReplicaRole.SERVING)
        assert await fleet.computes(fleet.config.served.path) < 0.01
        beat = replica.heartbeat()
        assert (beat.version, beat.lends, beat.reclaims, beat.follows, beat.serves) == (0, 1, 1, False, True)

        await fleet.wish(lent=True)
        await until(lambda: replica.version == manifest.version)
        assert await fleet.computes(version_dir(fleet.trainer.weights, manifest.version)) < 0.01


async def test_a_reclaim_cuts_rollouts_and_keeps_all_their_tokens(rig: Rig) -> None:
    async with lending(rig, "cut") as fleet:
        replica = fleet.replica
        await fleet.wish(lent=True)
        submission = await fleet.queue.submit([request(n=SEATS, sampling=LONG)])
        await until(lambda: replica.heartbeat().seats_rollouts == SEATS)
        await until(lambda: all(run.in_flight >= 5 for h in replica.harvester._held.values() for run in h.work._runs))
        await fleet.wish(lent=False)
        await fleet.until(ReplicaRole.SERVING)
        await until(lambda: not replica.harvester._held)
        (status,) = await fleet.queue.status(submission.group_ids)
        assert status is not None
        assert status.state is GroupState.QUEUED
        beat = replica.heartbeat()
        assert (beat.seats_rollouts, beat.rollout_lost) == (0, 0)

        await fleet.wish(lent=True)
        (group,) = await finished(fleet.queue, submission.group_ids)
        beat = replica.heartbeat()
    assert beat.rollout_salvaged >= SEATS * 5
    assert beat.rollout_tokens == sum(sample.num_response_tokens for sample in group.samples_G)
    sampled_by(rig.model, group)


async def test_users_finish_before_their_replica_is_lent(rig: Rig) -> None:
    async with lending(rig, "drained") as fleet:
        replica = fleet.replica
        with replica.users.hold(1):
            user = rig.engine.begin((72, 73), Sampling(max_tokens=120, temperature=0.0), seed=None)
            answering = asyncio.create_task(user.ended())
            await fleet.wish(lent=True)
            await until(lambda: replica.role is ReplicaRole.DRAINING)
            assert not replica.takes_users
            answer = await answering
        assert answer is not None
        ids = (72, 73, *answer.token_ids)
        expected = independent_logprobs(fleet.config.served.path, (ids,))[0][1:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)
        await fleet.until(ReplicaRole.ROLLOUT)


async def test_a_user_who_takes_too_long_keeps_the_replica(rig: Rig) -> None:
    async with lending(rig, "kept", drain_s=1.0) as fleet:
        with fleet.replica.users.hold(1):
            await fleet.wish(lent=True)
            await until(lambda: fleet.replica.role is ReplicaRole.DRAINING)
            await fleet.until(ReplicaRole.SERVING)
        assert fleet.replica.takes_users
        assert fleet.replica.heartbeat().lends == 0


async def test_nobody_stays_lent_when_nobody_wishes_any_more(rig: Rig) -> None:
    async with lending(rig, "silent", wish_s=1.0) as fleet:
        await fleet.wish(lent=True, ttl_s=0.5)
        await fleet.until(ReplicaRole.ROLLOUT)
        await fleet.until(ReplicaRole.SERVING)
        assert await fleet.computes(fleet.config.served.path) < 0.01


async def test_a_replica_whose_run_publishes_damaged_weights_goes_back_to_users(rig: Rig) -> None:
    async with lending(rig, "damaged", enter_s=2.0) as fleet:
        manifest = await fleet.trainer.publish(canary_shift=3.0)
        await fleet.trainer.make_current(manifest)
        await fleet.wish(lent=True)
        await fleet.until(ReplicaRole.ROLLOUT, ReplicaState.STALE)
        await fleet.until(ReplicaRole.SERVING)
        assert await fleet.computes(fleet.config.served.path) < 0.01
        beat = fleet.replica.heartbeat()
        assert (beat.lends, beat.reclaims) == (0, 1)
        assert [push.verified for push in beat.pushes] == [False] * len(beat.pushes)


async def test_what_a_switch_took_is_told_part_by_part(rig: Rig) -> None:
    async with lending(rig, "told") as fleet:
        await fleet.wish(lent=True)
        await fleet.until(ReplicaRole.ROLLOUT)
        await until(lambda: fleet.replica.heartbeat().lends == 1)
        await fleet.wish(lent=False)
        await fleet.until(ReplicaRole.SERVING)
        fleet.replica.answered(time.monotonic())
        out, back = fleet.replica.heartbeat().switches[-2:]
    assert [(s.to, list(s.parts)) for s in (out, back)] == [
        (ReplicaRole.ROLLOUT, ["seen", "drained", "swapped", "verified"]),
        (ReplicaRole.SERVING, ["seen", "drained", "swapped", "verified", "first_token"]),
    ]
    for switch in (out, back):
        assert list(switch.parts.values()) == sorted(switch.parts.values())
    assert back.parts["verified"] < 10
