"""One real engine with its loops: harvest, push by both paths, and everything that must stop a bad push."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollout.board import PushPath, ReplicaState
from rollout.redis_turns import RedisTurns
from rollout.rewards import BUILTIN
from rollout.types import FinishReason, GroupState, Purpose, RewardSpec, Sampling
from rollout.weights import version_dir
from services.rehearsal import RehearsalFailed, independent_logprobs, rehearse, write_perturbed
from services.staging import Staging
from services.swap import WeightSwap
from services.user_window import RequestTimes
from tests.engine_rig import SEATS, Rig, finished, request
from tests.fake_trainer import FakeTrainer

# a cold engine on a busy machine starts within the first test's time
pytestmark = pytest.mark.timeout(900)


async def test_groups_are_harvested_with_logprobs_versions_and_rewards(rig: Rig) -> None:
    config = rig.config("harvest")
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config):
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


async def test_behaviour_logprobs_are_those_of_the_model(rig: Rig) -> None:
    config = rig.config("logprobs")
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config):
        submission = await queue.submit([request(n=1)])
        (group,) = await finished(queue, submission.group_ids)
    segment = group.samples_G[0].segments[0]
    ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
    expected = independent_logprobs(rig.model, (ids,))[0][len(segment.prompt_ids_P) - 1 :]
    assert segment.behavior_logprobs_T == pytest.approx(expected, abs=1e-3)


async def test_a_seeded_group_repeats_and_its_samples_differ(rig: Rig) -> None:
    config = rig.config("seeds")
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config):
        submission = await queue.submit([request(seed=5), request(seed=5), request(seed=6)])
        first, again, other = await finished(queue, submission.group_ids)
    assert [s.text for s in first.samples_G] == [s.text for s in again.samples_G]
    assert len({s.text for s in (*first.samples_G, *other.samples_G)}) == 8


async def test_what_cannot_be_done_is_dead_with_the_reason(rig: Rig) -> None:
    config = rig.config("impossible")
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config):
        bad = [
            request(prompt_ids=(5,) * 256),
            request(prompt_ids=(9_999,)),
            request(reward=RewardSpec("nope")),
            request(reward=RewardSpec("exact_match")),
        ]
        submission = await queue.submit([*bad, request()])
        await finished(queue, submission.group_ids[-1:])
        async with asyncio.timeout(240):
            while (await queue.ledger()).dead < len(bad):  # noqa: ASYNC110  state of a server
                await asyncio.sleep(0.05)
        reasons = [s.reason or "" for s in await queue.status(submission.group_ids[:-1])]
    for part, reason in zip(("max_model_len=256", "vocabulary", "not configured", "answer"), reasons, strict=True):
        assert part in reason
    assert "exact_match" in BUILTIN


async def test_a_push_by_collective_is_verified_and_tokens_carry_the_new_version(rig: Rig) -> None:
    config = rig.config("collective")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
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


def computed_anew(trainer: FakeTrainer, prompt: Sequence[int], response: Sequence[int]) -> Sequence[float]:
    """Logprobs of a response, had version 1 computed all of prompt and response."""
    return independent_logprobs(version_dir(trainer.weights, 1), ((*prompt, *response),))[0][len(prompt) - 1 :]


async def test_a_prompt_seen_before_a_push_is_computed_anew_and_a_user_in_flight_is_not(rig: Rig) -> None:
    config = rig.config("prefixes")
    prompt, users = tuple(range(40, 120)), (72, 73)
    async with rig.trainer(config) as (trainer, queue), rig.replica(config):
        first = await queue.submit([request(n=1, prompt_ids=prompt)])
        await finished(queue, first.group_ids)
        user = rig.engine.begin(users, Sampling(max_tokens=200), seed=None)
        answer = asyncio.create_task(user.ended())
        while user.size < 5:  # noqa: ASYNC110  the engine tells nobody
            await asyncio.sleep(0.005)
        had = user.so_far()
        await trainer.push(await trainer.publish(noise=0.3), replicas=1)
        await trainer.beat_where(lambda b: b.version == 1)
        again = await queue.submit([request(n=1, prompt_ids=prompt)])
        (group,) = await finished(queue, again.group_ids)
        whole = await answer
    assert had is not None
    assert whole is not None
    assert whole.token_ids[: len(had.token_ids)] == had.token_ids
    assert [span.version for span in whole.version_spans] == [0, 1]
    segment = group.samples_G[0].segments[0]
    anew = computed_anew(trainer, prompt, segment.response_ids_T.tolist())
    assert segment.behavior_logprobs_T == pytest.approx(anew, abs=1e-3)
    # after the push the user's next tokens still rest on keys and values of the weights before it
    anew, pushed = computed_anew(trainer, users, whole.token_ids), whole.version_spans[1].start
    assert max(abs(own - new) for own, new in zip(whole.logprobs[pushed:], anew[pushed:], strict=True)) > 0.1


async def test_a_push_without_a_collective_arrives_by_artefact(rig: Rig) -> None:
    config = rig.config("artefact", collective=False)
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config):
        await trainer.make_current(await trainer.publish(noise=0.3))
        beat = await trainer.beat_where(lambda b: b.version == 1)
        assert (beat.pushes[-1].path, beat.pushes[-1].verified) == (PushPath.ARTEFACT, True)


async def test_bytes_that_never_arrived_are_caught_and_the_artefact_is_read_instead(rig: Rig) -> None:
    config = rig.config("spoiled")
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config):
        await trainer.push(await trainer.publish(noise=0.3), replicas=1, spoil=True)
        beat = await trainer.beat_where(lambda b: b.version == 1)
        assert [(p.path, p.verified) for p in beat.pushes] == [(PushPath.ARTEFACT, True)]


async def test_a_damaged_artefact_is_never_loaded(rig: Rig) -> None:
    config = rig.config("damaged")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config):
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


async def test_a_version_that_fails_its_canary_makes_the_replica_stale_until_a_good_one_comes(rig: Rig) -> None:
    config = rig.config("canary")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config):
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


async def test_a_fresh_replica_catches_up_before_it_harvests(rig: Rig) -> None:
    config = rig.config("fresh")
    async with rig.trainer(config) as (trainer, queue):
        await trainer.make_current(await trainer.publish())
        submission = await queue.submit([request(purpose=Purpose.EVAL), request()])
        async with rig.replica(config):
            groups = await finished(queue, submission.group_ids)
    assert {s.version for g in groups for x in g.samples_G for s in x.segments[0].version_spans} == {1}


async def test_weights_of_an_older_writer_are_refused(rig: Rig) -> None:
    config = rig.config("fenced")
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config):
        await trainer.make_current(await trainer.publish(token=trainer.token + 1))
        await trainer.beat_where(lambda b: b.version == 1)
        older = await trainer.publish()
        await trainer.make_current(older)
        await asyncio.sleep(1.0)
        (beat,) = await trainer.board.replicas(config.fleet)
        assert (older.version, beat.version, len(beat.pushes)) == (2, 1, 1)


async def test_a_stopped_replica_gives_its_leases_back(rig: Rig) -> None:
    config = rig.config("stopped")
    async with rig.trainer(config) as (trainer, queue):
        async with rig.replica(config):
            long = request(n=SEATS, sampling=Sampling(max_tokens=200, stop_token_ids=()))
            submission = await queue.submit([long] * 4)
            await trainer.beat_where(lambda b: b.seats_rollouts > 0)
        ledger = await queue.ledger()
        assert (ledger.leased, ledger.balance) == (0, 0)
        assert await trainer.board.replicas(config.fleet) == []
        assert len(submission.group_ids) == ledger.queued + ledger.experience


async def test_a_version_waits_while_another_replica_has_its_turn(rig: Rig) -> None:
    config = rig.config("turns")
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config):
        turns = RedisTurns(trainer.board._store, config.fleet)
        await trainer.beat_where(lambda b: b.state is ReplicaState.HEALTHY)
        assert await turns.take("another", share=0.5, ttl_s=60)
        await trainer.make_current(await trainer.publish())
        await asyncio.sleep(2.0)
        (beat,) = await trainer.board.replicas(config.fleet)
        assert (beat.version, beat.pushes) == (0, ())
        await turns.end("another")
        await trainer.beat_where(lambda b: b.version == 1)
        assert await turns.take("another", share=0.5, ttl_s=60)


async def test_weights_are_prepared_beside_those_in_use_and_taken_whole(rig: Rig, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    write_perturbed(rig.model, there)
    shutil.copytree(rig.model, back)
    ids = (72, 73, 74, 75)
    old = independent_logprobs(rig.model, (ids,))[0]
    new = independent_logprobs(there, (ids,))[0]
    assert old != pytest.approx(new, abs=0.1)
    await WeightSwap(rig.engine, watchdog_s=30).load(rig.model, version=0)
    for directory, before, after in ((there, old, new), (back, new, old), (there, old, new)):
        answered = asyncio.create_task(rig.engine.begin(ids, Sampling(max_tokens=40), seed=1).ended())
        await rig.engine.prepare(directory, within_s=30, wanted=lambda: True)
        assert await rig.engine.score(ids) == pytest.approx(before, abs=1e-3)
        assert await answered is not None
        await rig.engine.pause()
        # nothing is read any more
        directory.rename(elsewhere := tmp_path / "elsewhere")
        await rig.engine.reload(directory)
        elsewhere.rename(directory)
        await rig.engine.resume()
        assert await rig.engine.score(ids) == pytest.approx(after, abs=1e-3)
    await rig.engine.prepare(tmp_path / "nowhere", within_s=30, wanted=lambda: True)
    assert await rig.engine.score(ids) == pytest.approx(new, abs=1e-3)
    await WeightSwap(rig.engine, watchdog_s=30).load(rig.model, version=0)
    assert await rig.engine.score(ids) == pytest.approx(old, abs=1e-3)


async def test_a_preparation_that_was_given_up_gives_way_to_the_next_one(rig: Rig, tmp_path: Path) -> None:
    write_perturbed(rig.model, tmp_path)
    swap = WeightSwap(rig.engine, watchdog_s=30)
    await swap.load(tmp_path, version=0)
    begun = {"directory": str(tmp_path), "refresh_tied_head": True, "rest_s": 0.0, "pace": 0}
    await rig.client.collective_rpc("prepare_weights", kwargs=begun)
    await rig.engine.prepare(tmp_path, within_s=30, wanted=lambda: False)
    await rig.engine.prepare(rig.model, within_s=30, wanted=lambda: True)
    assert await rig.client.collective_rpc("take_prepared", kwargs={"directory": str(tmp_path)}) != [""]
    await swap.load(rig.model, version=0)
    assert await logprob_error(rig, rig.model) < 1e-3


async def test_a_preparation_waits_while_users_are_a_crowd_and_not_for_ever(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_perturbed(rig.model, tmp_path)
    swap, crowd = WeightSwap(rig.engine, watchdog_s=30), asyncio.Event()
    monkeypatch.setattr(rig.engine, "crowded", lambda: not crowd.is_set())
    preparing = asyncio.create_task(rig.engine.prepare(tmp_path, within_s=300, wanted=lambda: True))
    await asyncio.sleep(0.5)
    assert not preparing.done()
    crowd.set()
    async with asyncio.timeout(10):
        await preparing
    await swap.load(tmp_path, version=0)
    assert await logprob_error(rig, tmp_path) < 1e-3
    crowd.clear()
    async with asyncio.timeout(10):
        await rig.engine.prepare(rig.model, within_s=10, wanted=lambda: True)
    await swap.load(rig.model, version=0)
    assert await logprob_error(rig, rig.model) < 1e-3


async def test_a_crowd_is_waited_for_while_weights_are_wanted_and_not_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, started = [True], time.monotonic()
    monkeypatch.setattr(rig.engine, "crowded", lambda: bool(crowd))
    await rig.engine.uncrowded(within_s=0.3, wanted=lambda: True)
    assert time.monotonic() - started >= 0.3
    started = time.monotonic()
    await rig.engine.uncrowded(within_s=30, wanted=lambda: False)
    waiting = asyncio.create_task(rig.engine.uncrowded(within_s=30, wanted=lambda: True))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    crowd.clear()
    await waiting
    assert time.monotonic() - started < 2


async def test_first_tokens_of_users_are_waited_for_and_not_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = {"a": RequestTimes(0.0, None, None, 0)}
    monkeypatch.setattr(rig.engine, "users", lambda: waiting)
    started = time.monotonic()
    await rig.engine.first_tokens(within_s=0.3)
    assert time.monotonic() - started >= 0.3
    waiting.clear()
    started = time.monotonic()
    await rig.engine.first_tokens(within_s=30)
    assert time.monotonic() - started < 1


async def test_what_is_not_prepared_in_time_is_prepared_in_the_pause(rig: Rig, tmp_path: Path) -> None:
    write_perturbed(rig.model, tmp_path)
    for directory in (tmp_path, rig.model):
        await rig.engine.prepare(directory, within_s=0.0, wanted=lambda: True)
        await WeightSwap(rig.engine, watchdog_s=30).load(directory, version=0)
        assert await logprob_error(rig, directory) < 1e-3


async def test_an_engine_whose_second_model_is_given_up_goes_on_with_its_first(rig: Rig, tmp_path: Path) -> None:
    write_perturbed(rig.model, tmp_path)
    await rig.engine.put_back()
    swap = WeightSwap(rig.engine, watchdog_s=30)
    await swap.load(rig.model, version=0)
    await swap.prepare(tmp_path)
    await swap.load(tmp_path, version=0)
    assert await logprob_error(rig, tmp_path) < 1e-3
    assert await swap.give_up_ahead()
    assert await logprob_error(rig, rig.model) < 1e-3
    await swap.load(tmp_path, version=0)
    assert await logprob_error(rig, tmp_path) < 1e-3
    await swap.load(rig.model, version=0)


async def logprob_error(rig: Rig, model: Path) -> float:
    """Largest, nats."""
    ids = (72, 73, 74, 75)
    expected, found = independent_logprobs(model, (ids,))[0], await rig.engine.score(ids)
    return max(abs(x - y) for x, y in zip(expected, found, strict=True))


async def test_the_rehearsal_passes_with_the_fix_and_fails_without_it(rig: Rig) -> None:
    staging = Staging(Path("/dev/shm"), rig.config("x").fleet)
    staging.prepare()
    try:
        for group_limit in (None, 0):
            limit = {} if group_limit is None else {"independent_limit": group_limit}
            swap = WeightSwap(rig.engine, watchdog_s=30)
            gap = await rehearse(swap, model=rig.model, staging=staging, dtype="float32", tolerance=0.05, **limit)
            assert gap < 0.01
        unfixed = WeightSwap(rig.engine, watchdog_s=30, refresh_tied_head=False)
        with pytest.raises(RehearsalFailed, match="old weights in use"):
            await rehearse(unfixed, model=rig.model, staging=staging, dtype="float32", tolerance=0.05)
    finally:
        staging.close()
