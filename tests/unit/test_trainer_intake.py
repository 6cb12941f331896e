"""What becomes of the tokens of groups that are too old."""

from dataclasses import replace

import pytest

from rollout.memory_queue import MemoryQueue
from rollout.types import Experience, GroupState, Purpose, Sampling
from tests.queue_records import a_group, a_request
from trainer.config import StalenessConfig
from trainer.intake import Intake, add, collect, recollect
from trainer.journal import JournalEntry
from trainer.metrics import PushTotals, staleness_metrics
from trainer.starvation import Starvation
from trainer.summary import Totals, add_step, summarise


async def experiences(*versions: int) -> list[Experience]:
    """One of two samples, of three and four tokens, by each version."""
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    await queue.submit([a_request(i) for i in range(len(versions))])
    leases = await queue.lease("engine", count=len(versions), lease_s=60, purposes=[Purpose.TRAIN])
    for lease, version in zip(leases, versions, strict=True):
        await queue.complete(lease, a_group(version=version))
    return await queue.lease_experience(token, count=len(versions))


async def test_a_group_that_is_too_small_for_the_run_is_dead_and_not_stale() -> None:
    intake, (experience,) = Intake(), await experiences(9)
    add(intake, experience, version=9, staleness=StalenessConfig(min_group_samples=3))
    assert intake.dead == {experience.group_id: "n=2 is below staleness.min_group_samples=3"}
    assert (intake.groups, intake.stale_ids, intake.usable) == ([], [], 0)


async def test_tokens_of_stale_groups_reach_the_summary() -> None:
    intake = Intake()
    for experience in await experiences(0, 9, 1):
        add(intake, experience, version=9, staleness=StalenessConfig(max_age=2))
    assert (len(intake.groups), len(intake.stale_ids), intake.stale_tokens) == (1, 2, 14)
    totals: Totals = {}
    for _ in range(2):
        add_step(totals, {"applied": True, **staleness_metrics(intake)})
    summary = summarise(
        run="run",
        step=2,
        steps=2,
        first_version=1,
        version=2,
        totals=totals,
        evaluations=[],
        pushes=PushTotals(),
        ledger={},
        wall_s=1.0,
    )
    assert (summary["groups_stale"], summary["tokens_stale"]) == (4, 28)


def test_a_step_that_was_not_applied_has_trained_nothing() -> None:
    totals: Totals = {}
    record = {"groups": 4, "samples": 16, "trained_tokens": 100.0, "generated_tokens": 120, "staleness": {}}
    for applied in (True, False):
        add_step(totals, {**record, "applied": applied})
    assert [totals[name] for name in ("groups", "samples", "trained_tokens", "generated_tokens")] == [4, 16, 100, 240]
    assert totals["skipped_steps"] == 1


async def collected(queue: MemoryQueue, token: int, *, max_filtered: int) -> Intake:
    intake = await collect(
        queue,
        token,
        batch_groups=2,
        version=0,
        staleness=StalenessConfig(),
        max_filtered=max_filtered,
        stall_s=60,
        starvation=Starvation(queue, limit=99),
        stopped=lambda: False,
    )
    assert intake is not None
    return intake


async def scored(*rewards: tuple[float, float]) -> tuple[MemoryQueue, int, list[str]]:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = (await queue.submit([a_request(i) for i in range(len(rewards))])).group_ids
    leases = await queue.lease("engine", count=len(rewards), lease_s=60, purposes=[Purpose.TRAIN])
    for lease, pair in zip(leases, rewards, strict=True):
        await queue.complete(lease, a_group(rewards=pair))
    return queue, token, list(ids)


@pytest.mark.parametrize(("temperature", "dead"), [(0.0, True), (0.005, True), (0.01, False), (1.0, False)])
async def test_what_an_engine_samples_at_another_temperature_than_asked_for_is_not_trained(
    temperature: float, dead: bool
) -> None:
    (experience,) = await experiences(0)
    request = replace(experience.request, sampling=replace(experience.request.sampling, temperature=temperature))
    intake = Intake()
    add(intake, replace(experience, request=request), version=0, staleness=StalenessConfig())
    assert bool(intake.dead) == dead
    assert all(f"temperature {temperature}" in reason for reason in intake.dead.values())


FLAT, VARIED = (1.0, 1.0), (0.0, 1.0)


async def test_dynamic_sampling_replaces_groups_without_variance_and_the_ledger_counts_them() -> None:
    queue, token, ids = await scored(FLAT, VARIED, (0.0, 0.0), VARIED)
    intake = await collected(queue, token, max_filtered=8)
    assert [g.experience.group_id for g in intake.groups] == [ids[1], ids[3]]
    assert intake.filtered_ids == [ids[0], ids[2]]
    ledger = await queue.ledger()
    assert (ledger.filtered, ledger.experience, ledger.balance) == (2, 2, 0)
    assert ledger == await queue.audit()
    assert staleness_metrics(intake)["filtered_groups"] == 2
    entry = intake.entry(step=1, version=0, seed=7, max_age=4)
    assert (entry.group_ids, entry.filtered_ids, entry.taken) == ((ids[1], ids[3]), (ids[0], ids[2]), 4)
    again = await recollect(queue, token, entry, StalenessConfig())
    assert [g.experience.group_id for g in again.groups] == [ids[1], ids[3]]


async def test_beyond_the_limit_groups_without_variance_fill_the_batch() -> None:
    queue, token, ids = await scored(FLAT, FLAT, FLAT)
    intake = await collected(queue, token, max_filtered=1)
    assert intake.filtered_ids == ids[:1]
    assert [g.experience.group_id for g in intake.groups] == ids[1:]


async def test_without_dynamic_sampling_nothing_is_filtered() -> None:
    queue, token, ids = await scored(FLAT, VARIED)
    intake = await collected(queue, token, max_filtered=0)
    assert ([g.experience.group_id for g in intake.groups], intake.filtered_ids) == (ids, [])


async def test_masked_samples_do_not_make_a_group_varied() -> None:
    intake = Intake()
    (one,) = await experiences(5)
    old = a_group(version=0, rewards=(9.0, 9.0)).samples_G[0]
    group = a_group(3, version=5, rewards=(1.0, 1.0, 0.0))
    mixed = replace(group, samples_G=(*group.samples_G[:2], old))
    add(intake, replace(one, group=mixed), version=5, staleness=StalenessConfig(max_age=1), max_filtered=1)
    assert intake.filtered_ids == [one.group_id]


async def aged(*versions: int) -> tuple[MemoryQueue, int, list[str]]:
    """Groups whose first sample is of version 5 and whose second is of the given one."""
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = (await queue.submit([a_request(i) for i in range(len(versions))])).group_ids
    leases = await queue.lease("engine", count=len(versions), lease_s=60, purposes=[Purpose.TRAIN])
    for lease, version in zip(leases, versions, strict=True):
        first, second = a_group(version=5).samples_G[0], a_group(version=version).samples_G[1]
        await queue.complete(lease, replace(a_group(), samples_G=(first, second)))
    return queue, token, list(ids)


async def test_a_repeated_step_trains_what_it_trained_before_whatever_the_settings_became() -> None:
    queue, token, ids = await aged(5, 3, 0)
    intake = Intake()
    before = StalenessConfig(max_age=2, min_group_samples=1)
    for experience in await queue.lease_experience(token, count=3):
        add(intake, experience, version=5, staleness=before)
    entry = intake.entry(step=6, version=5, seed=7, max_age=before.max_age)
    for after in (StalenessConfig(max_age=0), StalenessConfig(max_age=9, min_group_samples=2)):
        again = await recollect(queue, token, entry, after)
        assert [(g.experience.group_id, g.fresh_G) for g in again.groups] == [
            (ids[0], (True, True)),
            (ids[1], (True, True)),
            (ids[2], (True, False)),
        ]


async def test_what_a_repeated_step_can_train_no_more_leaves_the_queue() -> None:
    queue, token, ids = await aged(5, 0)
    (lost,) = (await queue.submit([replace(a_request(), sampling=Sampling(max_tokens=4, temperature=0.0))])).group_ids
    for lease in await queue.lease("engine", count=1, lease_s=60, purposes=[Purpose.TRAIN]):
        await queue.complete(lease, a_group(version=5))
    entry = JournalEntry(6, 5, (*ids, lost), (), (), seed=7)
    again = await recollect(queue, token, entry, StalenessConfig(max_age=2, min_group_samples=2))
    assert [g.experience.group_id for g in again.groups] == ids[:1]
    assert [status and status.state for status in await queue.status([*ids, lost])] == [
        GroupState.EXPERIENCE,
        GroupState.STALE,
        GroupState.DEAD,
    ]
