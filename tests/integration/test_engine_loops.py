"""One real engine with its loops: harvest, push by both paths, and everything that must stop a bad push."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.board import PushPath, ReplicaState
from rollout.config import ModelConfig, RedisConfig
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.rewards import BUILTIN
from rollout.types import FinishReason, Group, GroupState, Purpose, RewardSpec, RolloutRequest, Sampling
from rollout.weights import version_dir
from services.config import EngineConfig, FleetConfig, HarvestConfig, PushConfig
from services.engine import Replica
from services.engine_arguments import engine_arguments
from services.rehearsal import RehearsalFailed, independent_logprobs, rehearse
from services.reward_pool import RewardPool
from services.staging import Staging
from services.swap import WeightSwap
from services.vllm_engine import VllmEngine
from tests.fake_trainer import FakeTrainer
from tests.tiny_models import build_policy

SEATS = 8
# a cold engine on a busy machine starts within the first test's time
pytestmark = pytest.mark.timeout(480)


@dataclass
class Bench:
    """The engine and its surroundings; each test takes its own fleet and run."""

    engine: VllmEngine
    model: Path
    redis: RedisConfig
    tmp: Path

    def config(self, name: str, **push: object) -> FleetConfig:
        return FleetConfig(
            fleet=f"fleet-{name}",
            run=f"run-{name}",
            model=ModelConfig(path=self.model),
            redis=self.redis,
            engine=EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=SEATS),
            harvest=HarvestConfig(user_reserve=2, lease_s=5.0, poll_s=0.02),
            push=PushConfig(**{"poll_s": 0.02, "rehearsal": False, **push}),
        )

    @asynccontextmanager
    async def replica(self, config: FleetConfig) -> AsyncIterator[Replica]:
        """A replica's loops on the engine, which is put back to the model as loaded first."""
        await WeightSwap(self.engine, watchdog_s=30).load(self.model, version=0)
        store = await RedisStore.connect(self.redis)
        replica = Replica(config, self.engine, store, RewardPool(config.rewards))
        await replica.start()
        try:
            yield replica
        finally:
            await replica.stop()

    @asynccontextmanager
    async def trainer(self, config: FleetConfig) -> AsyncIterator[tuple[FakeTrainer, RedisQueue]]:
        store = await RedisStore.connect(self.redis)
        queue, board = RedisQueue(store, config.run), RedisBoard(store)
        token = await queue.acquire_writer("fake-trainer", ttl_s=120)
        await queue.set_gate(token, batch_groups=64, eta=4)
        await board.attach(config.fleet, config.run, token)
        weights = self.tmp / config.run
        yield FakeTrainer(config.fleet, config.run, board, token, self.model, weights), queue
        await store.close()


@pytest.fixture(scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tmp = tmp_path_factory.mktemp("engine")
    model = build_policy(tmp / "policy", "qwen3_tied")
    arguments = engine_arguments(EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=SEATS))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        client = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        try:
            with EmbeddedRedis(Path(directory)) as redis:
                yield Bench(VllmEngine(client), model, RedisConfig(url=redis.url), tmp)
        finally:
            client.shutdown()


def request(
    n: int = 4, *, purpose: Purpose = Purpose.TRAIN, seed: int | None = None, **changes: object
) -> RolloutRequest:
    fields = {
        "prompt_ids": (72, 73, 74),
        "prompt_text": "abc",
        "n": n,
        "sampling": Sampling(max_tokens=12, seed=seed),
        "reward": RewardSpec("contains", {"text": "e"}),
        "purpose": purpose,
    }
    return RolloutRequest(**{**fields, **changes})


async def finished(queue: RedisQueue, group_ids: tuple[str, ...], *, timeout_s: float = 60) -> list[Group]:
    """The groups, once all of them are scored."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await queue.status(group_ids, with_groups=True)
            if all(s is not None and s.group is not None for s in found):
                return [s.group for s in found]
            await asyncio.sleep(0.05)


async def test_groups_are_harvested_with_logprobs_versions_and_rewards(bench: Bench) -> None:
    config = bench.config("harvest")
    async with bench.trainer(config) as (_trainer, queue), bench.replica(config):
        # more samples in one group than there are seats: it runs in waves
        requests = [request(n=2 * SEATS), *(request(purpose=p) for p in (Purpose.EVAL, Purpose.COLLECT))]
        submission = await queue.submit(requests)
        groups = await finished(queue, submission.group_ids)
        states = [s.state for s in await queue.status(submission.group_ids)]
    assert states == [GroupState.EXPERIENCE, GroupState.DELIVERED, GroupState.DELIVERED]
    assert [len(g.samples_G) for g in groups] == [2 * SEATS, 4, 4]
    for group in groups:
        for sample, reward in zip(group.samples_G, group.rewards_G, strict=True):
            (segment,) = sample.segments
            length = len(segment.response_ids_T)
            assert reward == float("e" in sample.text)
            assert (segment.finish_reason is FinishReason.LENGTH) == (length == 12 and segment.response_ids_T[-1] != 1)
            assert [(s.version, s.start, s.stop) for s in segment.version_spans] == [(0, 0, length)]


async def test_behaviour_logprobs_are_those_of_the_model(bench: Bench) -> None:
    config = bench.config("logprobs")
    async with bench.trainer(config) as (_trainer, queue), bench.replica(config):
        submission = await queue.submit([request(n=1)])
        (group,) = await finished(queue, submission.group_ids)
    segment = group.samples_G[0].segments[0]
    ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
    expected = independent_logprobs(bench.model, (ids,))[0][len(segment.prompt_ids_P) - 1 :]
    assert segment.behavior_logprobs_T == pytest.approx(expected, abs=1e-3)


async def test_a_seeded_group_repeats_and_its_samples_differ(bench: Bench) -> None:
    config = bench.config("seeds")
    async with bench.trainer(config) as (_trainer, queue), bench.replica(config):
        submission = await queue.submit([request(seed=5), request(seed=5), request(seed=6)])
        first, again, other = await finished(queue, submission.group_ids)
    assert [s.text for s in first.samples_G] == [s.text for s in again.samples_G]
    assert len({s.text for s in (*first.samples_G, *other.samples_G)}) == 8


async def test_what_cannot_be_done_is_dead_with_the_reason(bench: Bench) -> None:
    config = bench.config("impossible")
    async with bench.trainer(config) as (_trainer, queue), bench.replica(config):
        bad = [
            request(prompt_ids=(5,) * 256),
            request(prompt_ids=(9_999,)),
            request(reward=RewardSpec("nope")),
            request(reward=RewardSpec("exact_match")),
        ]
        submission = await queue.submit([*bad, request()])
        await finished(queue, submission.group_ids[-1:])
        async with asyncio.timeout(30):
            while (await queue.ledger()).dead < len(bad):  # noqa: ASYNC110  state of a server
                await asyncio.sleep(0.05)
        reasons = [s.reason or "" for s in await queue.status(submission.group_ids[:-1])]
    for part, reason in zip(("max_model_len=256", "vocabulary", "not configured", "answer"), reasons, strict=True):
        assert part in reason
    assert "exact_match" in BUILTIN


async def test_a_push_by_collective_is_verified_and_tokens_carry_the_new_version(bench: Bench) -> None:
    config = bench.config("collective")
    async with bench.trainer(config) as (trainer, queue), bench.replica(config) as replica:
        await trainer.beat_where(lambda b: b.state is ReplicaState.HEALTHY)
        for expected in (1, 2):
            manifest = await trainer.publish(noise=0.3)
            await trainer.push(manifest, replicas=1)
            beat = await trainer.beat_where(lambda b, v=expected: b.version == v)
            push = beat.pushes[-1]
            assert (push.version, push.path, push.verified) == (expected, PushPath.COLLECTIVE, True)
            assert push.canary_gap < 0.01
            assert push.pause_s < 2.0
        submission = await queue.submit([request(purpose=Purpose.EVAL)])
        (group,) = await finished(queue, submission.group_ids)
        assert {s.version for x in group.samples_G for s in x.segments[0].version_spans} == {2}
        assert replica.reconciler.version == 2


async def test_a_push_without_a_collective_arrives_by_artefact(bench: Bench) -> None:
    config = bench.config("artefact", collective=False)
    async with bench.trainer(config) as (trainer, _queue), bench.replica(config):
        await trainer.make_current(await trainer.publish(noise=0.3))
        beat = await trainer.beat_where(lambda b: b.version == 1)
        assert (beat.pushes[-1].path, beat.pushes[-1].verified) == (PushPath.ARTEFACT, True)


async def test_bytes_that_never_arrived_are_caught_and_the_artefact_is_read_instead(bench: Bench) -> None:
    config = bench.config("spoiled")
    async with bench.trainer(config) as (trainer, _queue), bench.replica(config):
        await trainer.push(await trainer.publish(noise=0.3), replicas=1, spoil=True)
        beat = await trainer.beat_where(lambda b: b.version == 1)
        assert [(p.path, p.verified) for p in beat.pushes] == [(PushPath.ARTEFACT, True)]


async def test_a_damaged_artefact_is_never_loaded(bench: Bench) -> None:
    config = bench.config("damaged")
    async with bench.trainer(config) as (trainer, queue), bench.replica(config):
        manifest = await trainer.publish(noise=0.3)
        file = version_dir(trainer.weights, manifest.version) / manifest.buckets[0].file
        damaged = bytearray(file.read_bytes())
        damaged[-5] ^= 0xFF
        file.write_bytes(damaged)
        await trainer.make_current(manifest)
        beat = await trainer.beat_where(lambda b: "sha256" in b.detail)
        assert (beat.version, beat.pushes) == (0, ())
        # the replica is one version behind, which harvest.max_lag allows only after it was in step once
        submission = await queue.submit([request(purpose=Purpose.EVAL)])
        file.write_bytes(bytes(damaged[:-5]) + bytes([damaged[-5] ^ 0xFF]) + bytes(damaged[-4:]))
        await trainer.beat_where(lambda b: b.version == 1)
        await finished(queue, submission.group_ids)


async def test_a_version_that_fails_its_canary_makes_the_replica_stale_until_a_good_one_comes(bench: Bench) -> None:
    config = bench.config("canary")
    async with bench.trainer(config) as (trainer, queue), bench.replica(config):
        await trainer.make_current(await trainer.publish(canary_shift=1.0))
        beat = await trainer.beat_where(lambda b: len(b.pushes) == 3)
        assert (beat.state, beat.version) == (ReplicaState.STALE, 0)
        assert not any(p.verified for p in beat.pushes)
        submission = await queue.submit([request(purpose=Purpose.EVAL)])
        await asyncio.sleep(1.0)
        (status,) = await queue.status(submission.group_ids)
        assert status is not None
        assert (status.state, status.attempt) == (GroupState.QUEUED, 0)
        await trainer.make_current(await trainer.publish())
        (group,) = await finished(queue, submission.group_ids)
        assert {s.version for x in group.samples_G for s in x.segments[0].version_spans} == {2}


async def test_a_fresh_replica_catches_up_before_it_harvests(bench: Bench) -> None:
    config = bench.config("fresh")
    async with bench.trainer(config) as (trainer, queue):
        await trainer.make_current(await trainer.publish())
        submission = await queue.submit([request(purpose=Purpose.EVAL), request()])
        async with bench.replica(config):
            groups = await finished(queue, submission.group_ids)
    assert {s.version for g in groups for x in g.samples_G for s in x.segments[0].version_spans} == {1}


async def test_weights_of_an_older_writer_are_refused(bench: Bench) -> None:
    config = bench.config("fenced")
    async with bench.trainer(config) as (trainer, _queue), bench.replica(config):
        await trainer.make_current(await trainer.publish(token=trainer.token + 1))
        beat = await trainer.beat_where(lambda b: b.version == 0 and b.state is ReplicaState.STALE, timeout_s=10)
        assert beat.pushes == ()


async def test_a_stopped_replica_gives_its_leases_back(bench: Bench) -> None:
    config = bench.config("stopped")
    async with bench.trainer(config) as (trainer, queue):
        async with bench.replica(config):
            long = request(n=SEATS, sampling=Sampling(max_tokens=200, stop_token_ids=()))
            submission = await queue.submit([long] * 4)
            await trainer.beat_where(lambda b: b.seats_rollouts > 0)
        ledger = await queue.ledger()
        assert (ledger.leased, ledger.balance) == (0, 0)
        assert await trainer.board.replicas(config.fleet) == []
        assert len(submission.group_ids) == ledger.queued + ledger.experience


async def test_the_rehearsal_passes_with_the_fix_and_fails_without_it(bench: Bench) -> None:
    staging = Staging(Path("/dev/shm"), bench.config("x").fleet)
    staging.prepare()
    try:
        for group_limit in (None, 0):
            limit = {} if group_limit is None else {"independent_limit": group_limit}
            swap = WeightSwap(bench.engine, watchdog_s=30)
            gap = await rehearse(swap, model=bench.model, staging=staging, dtype="float32", tolerance=0.05, **limit)
            assert gap < 0.01
        unfixed = WeightSwap(bench.engine, watchdog_s=30, refresh_tied_head=False)
        with pytest.raises(RehearsalFailed, match="old weights in use"):
            await rehearse(unfixed, model=bench.model, staging=staging, dtype="float32", tolerance=0.05)
    finally:
        staging.close()
