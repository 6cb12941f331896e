"""Users on the base, rollouts on adapters that come and go, on one real engine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout.board import Heartbeat, PushPath, ReplicaState
from rollout.types import Group, Partial, Sampling
from rollout.weights import version_dir
from services.adapter_rehearsal import rehearse_adapter
from services.adapters import Phase
from services.config import EngineConfig, SharingConfig
from services.replica import Replica
from services.rollout_adapters import RolloutAdapters
from services.staging import Staging
from tests.engine_rig import SEATS, Rig, finished, request, started
from tests.fake_trainer import AdapterTrainer, FakeTrainer, peft_logprobs
from tests.tiny_models import build_endless_policy

# the engine starts within the first test's time
pytestmark = pytest.mark.timeout(900)

GREEDY = Sampling(max_tokens=24, temperature=0.0)
LONG = Sampling(max_tokens=600)
"""Some seconds, in which a few pushes fit."""
USER_PROMPT = tuple(range(70, 102))
"""Two blocks of the prefix cache."""


@pytest.fixture(scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    sharing = SharingConfig(mode="adapter", max_lora_rank=8, rollout_adapters=2)
    tmp = tmp_path_factory.mktemp("adapters")
    model = build_endless_policy(tmp / "policy")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    settings = EngineConfig(dtype="float32", max_model_len=2048, max_num_seqs=SEATS)
    async with started(model, tmp, sharing, settings) as rig:
        yield rig


async def user(rig: Rig) -> Partial:
    """What a user on the base gets, greedily."""
    answer = await rig.engine.begin(USER_PROMPT, GREEDY, seed=None).ended()
    assert answer is not None
    return answer


def adapters(replica: Replica) -> RolloutAdapters:
    assert isinstance(replica._swap, RolloutAdapters)
    return replica._swap


async def pushed(trainer: FakeTrainer, **how: Any) -> Heartbeat:
    manifest = await trainer.publish(noise=0.3, **how)
    await trainer.push(manifest, replicas=1)
    return await trainer.beat_where(lambda b: b.version == manifest.version)


async def generating(replica: Replica, count: int) -> None:
    """Until as many samples have tokens."""
    async with asyncio.timeout(240):
        while True:
            runs = [run for held in replica.harvester._held.values() for run in held.work._runs if run.seated]
            if len(runs) == count and all(run.in_flight >= 5 for run in runs):
                return
            await asyncio.sleep(0.005)


async def settled_to(rig: Rig, replica: Replica, versions: list[int]) -> None:
    """Until the engine has the adapters of these versions and no others."""
    async with asyncio.timeout(240):
        while [adapter.version for adapter in adapters(replica).adapters] != versions:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert await rig.adapters() == {a.number for a in adapters(replica).adapters}


def check_logprobs(rig: Rig, trainer: FakeTrainer, group: Group) -> None:
    """Every token has the logprob that PEFT computes under the version which the sample says made it."""
    for sample in group.samples_G:
        (segment,) = sample.segments
        ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
        for span in segment.version_spans:
            model: Any = AutoModelForCausalLM.from_pretrained(rig.model)
            if span.version:
                model = PeftModel.from_pretrained(model, version_dir(trainer.weights, span.version))
            expected = peft_logprobs(model, (ids,))[0][len(segment.prompt_ids_P) - 1 :]
            found = segment.behavior_logprobs_T[span.start : span.stop]
            assert found == pytest.approx(expected[span.start : span.stop], abs=2e-3)


async def test_users_on_the_base_get_the_same_answer_before_during_and_after_pushes(rig: Rig) -> None:
    config = rig.config("users")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        await trainer.beat_where(lambda b: b.state is ReplicaState.HEALTHY)
        before = await user(rig)
        answers: list[Partial] = []

        async def ask() -> None:
            while True:
                answers.append(await user(rig))

        asking = asyncio.create_task(ask())
        submissions = []
        for version in (1, 2, 3):
            push = (await pushed(trainer)).pushes[-1]
            assert (push.version, push.path, push.verified) == (version, PushPath.COLLECTIVE, True)
            assert push.canary_gap < 2e-3
            assert 0 < push.pause_s < 5
            submissions.append(await queue.submit([request(n=2, sampling=LONG)]))
            await generating(replica, 2 * version)
        during = len(answers)
        groups = [group for s in submissions for group in await finished(queue, s.group_ids)]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await settled_to(rig, replica, [3])
        after = await user(rig)
    assert len(answers) > during + 3
    assert {answer.token_ids for answer in (*answers, after)} == {before.token_ids}
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    seen = {s.version for g in groups for x in g.samples_G for s in x.segments[0].version_spans}
    assert seen == {1, 2, 3}


async def test_rollouts_have_the_logprobs_that_peft_computes(rig: Rig) -> None:
    config = rig.config("logprobs")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config):
        await pushed(trainer)
        submission = await queue.submit([request(n=4)])
        (group,) = await finished(queue, submission.group_ids)
        spans = {(s.version, s.start) for x in group.samples_G for s in x.segments[0].version_spans}
        assert spans == {(1, 0)}
        check_logprobs(rig, trainer, group)


async def test_what_runs_when_a_version_comes_ends_on_the_version_that_it_began_with(rig: Rig) -> None:
    config = rig.config("two")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        await pushed(trainer)
        first = await queue.submit([request(n=2, sampling=LONG)])
        await generating(replica, 2)
        await pushed(trainer)
        second = await queue.submit([request(n=2, sampling=LONG)])
        await generating(replica, 4)
        both = adapters(replica).adapters
        assert [(a.version, a.phase, a.requests) for a in both] == [(1, Phase.LEAVING, 2), (2, Phase.CURRENT, 2)]
        (old,), (new,) = await finished(queue, first.group_ids), await finished(queue, second.group_ids)
        await settled_to(rig, replica, [2])
        for group, version in ((old, 1), (new, 2)):
            assert {s.version for x in group.samples_G for s in x.segments[0].version_spans} == {version}
            check_logprobs(rig, trainer, group)
        assert replica.harvester.tally.cuts == 0


async def test_samples_two_versions_old_are_cut_to_make_room_and_go_on(rig: Rig) -> None:
    config = rig.config("three")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        await pushed(trainer)
        submission = await queue.submit([request(n=2, sampling=LONG)])
        await generating(replica, 2)
        await pushed(trainer)
        await pushed(trainer)
        (group,) = await finished(queue, submission.group_ids)
        await settled_to(rig, replica, [3])
        assert (replica.harvester.tally.cuts, replica.harvester.tally.lost) == (2, 0)
        spans = [[s.version for s in x.segments[0].version_spans] for x in group.samples_G]
        assert spans == [[1, 2]] * 2
        check_logprobs(rig, trainer, group)


async def test_a_version_that_fails_its_canary_leaves_rollouts_on_the_one_before(rig: Rig) -> None:
    config = rig.config("canary")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        await pushed(trainer)
        await trainer.make_current(await trainer.publish(noise=0.3, canary_shift=1.0))
        beat = await trainer.beat_where(lambda b: len(b.pushes) == 4)
        assert [p.verified for p in beat.pushes] == [True, False, False, False]
        assert (beat.state, beat.version) == (ReplicaState.HEALTHY, 1)
        submission = await queue.submit([request()])
        (group,) = await finished(queue, submission.group_ids)
        assert {s.version for x in group.samples_G for s in x.segments[0].version_spans} == {1}
        await settled_to(rig, replica, [1])


@pytest.mark.parametrize(
    ("rank", "layers", "words"),
    [
        (16, ("q_proj",), "adapter of rank 16 .*max_lora_rank=8"),
        (4, ("q_proj", "norm"), "changes norm .*serves adapters of"),
    ],
)
async def test_an_adapter_that_the_engine_cannot_serve_is_refused_with_both_values(
    rig: Rig, rank: int, layers: tuple[str, ...], words: str
) -> None:
    config = rig.config(f"refused-{rank}", collective=False)
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config):
        assert isinstance(trainer, AdapterTrainer)
        trainer.rank = rank
        manifest = await trainer.publish()
        if "norm" in layers:
            assert manifest.adapter is not None
            manifest = replace(manifest, adapter=replace(manifest.adapter, target_modules=layers))
            (version_dir(trainer.weights, 1) / "manifest.json").write_text(manifest.to_json())
        await trainer.make_current(manifest)
        beat = await trainer.beat_where(lambda b: bool(re.search(words, b.detail)))
        assert (beat.version, beat.pushes) == (0, ())


async def test_whole_weights_are_refused(rig: Rig) -> None:
    config = rig.config("whole", collective=False)
    async with rig.trainer(config) as (adapter_trainer, _queue), rig.replica(config):
        a = adapter_trainer
        trainer = FakeTrainer(a.fleet, a.run, a.board, a.token, a.model, a.weights)
        await trainer.make_current(await trainer.publish())
        beat = await trainer.beat_where(
            lambda b: "is whole weights, but this fleet has sharing.mode=adapter" in b.detail
        )
        assert (beat.version, beat.sharing, beat.max_lora_rank) == (0, "adapter", 8)
        assert "q_proj" in beat.adapter_layers


async def test_an_adapter_that_cannot_be_loaded_leaves_the_engine_as_it_was(rig: Rig, tmp_path: Path) -> None:
    config = rig.config("broken", collective=False)
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config) as replica:
        before = await user(rig)
        manifest = await trainer.publish(noise=0.3)
        side = version_dir(trainer.weights, 1) / "adapter_config.json"
        whole = side.read_text()
        side.write_text(whole.replace('"r": 4', '"r": 64'))
        await trainer.make_current(manifest)
        await trainer.beat_where(lambda b: "the engine cannot load the adapter of version 1" in b.detail)
        await settled_to(rig, replica, [])
        assert (await user(rig)).token_ids == before.token_ids
        side.write_text(whole)
        again = await trainer.publish(noise=0.3)
        await trainer.make_current(again)
        await trainer.beat_where(lambda b: b.version == again.version)


async def test_the_rehearsal_passes_whatever_the_size_of_the_model(rig: Rig) -> None:
    staging = Staging(Path("/dev/shm"), rig.config("x").fleet)
    staging.prepare()
    ways = RolloutAdapters(rig.engine, places=2, first=100, max_rank=8, watchdog_s=30)
    await ways.start()
    try:
        for limit in ({}, {"independent_limit": 0}):
            gap = await rehearse_adapter(
                ways, model=rig.model, staging=staging, dtype="float32", tolerance=0.05, **limit
            )
            assert gap < 0.01
    finally:
        staging.close()
