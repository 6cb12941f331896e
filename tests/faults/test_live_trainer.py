"""A trainer of a live queue, board and replica is killed, stopped or told to end at a moment of a step, a push or a
checkpoint: the next one goes on, no version is used twice, and no group is lost or trained twice."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.books import Books
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Group, Sample
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.light_replica import LightReplica, replicating
from tests.faults.light_trainer import LightTrainer, forkserver, light_config
from tests.queue_records import a_group, a_segment, connected
from tests.tiny_models import build_policy
from trainer.config import TrainConfig
from trainer.milestone import Milestone, PushMilestone

Moment = Milestone | PushMilestone
STEPS = 6
ONCE_A_CHECKPOINT = {Milestone.CHECKPOINT_SEALED, Milestone.CHECKPOINT_RENAMED, Milestone.SETTLED}
OVERSIZED = 600
FENCED = 3
"""Exit code of a trainer that another has replaced."""
REFUSED = 1
"""Of one that found something wrong, and says what."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


@dataclass
class Run:
    """A run with one replica, and whoever trains it."""

    config: TrainConfig
    store: RedisStore
    replica: LightReplica

    async def books(self) -> Books:
        """Once the auditor has nothing to say."""
        assert await contradictions(self.config.run_dir, self.store) == []
        return await RedisBooks(self.store, self.config.run).books()

    def journal(self) -> list[str]:
        path = self.config.run_dir / "journal.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    async def trained(self, fault: FaultRow) -> None:
        """By a trainer that starts now, to the last step; and every promise holds."""
        before = self.journal()
        with LightTrainer(self.config) as trainer, fault.recovery():
            assert await trainer.exit_code() == 0, trainer.output
        books, after = await self.books(), self.journal()
        assert after[: len(before)] == before, "what was decided stays so"
        ids = [gid for line in after for gid in json.loads(line)["group_ids"]]
        fault.duplicated = len(ids) - len(set(ids))
        fault.lost = STEPS * self.config.batch_groups - books.ledger.trained
        assert [json.loads(line)["step"] for line in after] == list(range(1, STEPS + 1))
        assert self.replica.versions == sorted(set(self.replica.versions)), "no version comes twice, or after a later"


@pytest.fixture
async def run(redis_server: EmbeddedRedis, model_dir: Path, tmp_path: Path) -> AsyncIterator[Run]:
    forkserver()
    async with connected(redis_server.url) as store:
        config = light_config(tmp_path, store.config, f"live-{time.time_ns()}", model_dir)
        async with replicating(LightReplica(store, config, tmp_path)) as replica:
            yield Run(config, store, replica)


def count(at: Moment) -> int:
    """After the checkpoint of step 3, and not beyond that of step 6."""
    return 2 if at in ONCE_A_CHECKPOINT else 5


@pytest.mark.fault("kill -9 of a live trainer in a step, a push or a checkpoint", "P5")
@pytest.mark.parametrize("at", [*Milestone, *PushMilestone])
async def test_a_live_trainer_killed_at_a_milestone_loses_nothing_and_uses_no_version_again(
    run: Run, at: Moment, fault: FaultRow
) -> None:
    with LightTrainer(run.config, at, count(at)) as victim:
        assert await victim.exit_code() == -signal.SIGKILL, victim.output
    given = (await run.books()).newest_version
    await run.trained(fault)
    assert (await run.books()).newest_version > given


@pytest.mark.fault("SIGSTOP of the trainer", "P12")
@pytest.mark.parametrize(
    "at", [Milestone.UPDATED, Milestone.VERSION_WRITTEN, Milestone.CHECKPOINT_SEALED, Milestone.CHECKPOINT_RENAMED]
)
async def test_a_trainer_that_stood_still_while_another_took_the_run_over_writes_nothing_when_it_goes_on(
    run: Run, at: Milestone, fault: FaultRow
) -> None:
    queue = RedisQueue(run.store, run.config.run)
    with LightTrainer(run.config, at, count(at), "SIGSTOP") as victim:
        await victim.stopped()
        await asyncio.sleep(run.config.writer_ttl_s)
        usurper = await queue.acquire_writer("usurper", ttl_s=60)
        before = await run.books(), checkpoints(run.config)
        victim.go_on()
        assert await victim.exit_code() == FENCED, victim.output
        after = await run.books(), checkpoints(run.config)
    assert (after[0].ledger.trained, after[0].current, after[0].writer_token, after[1]) == (
        before[0].ledger.trained,
        before[0].current,
        usurper,
        before[1],
    )
    await queue.release_writer(usurper)
    await run.trained(fault)


@pytest.mark.fault("SIGTERM of the trainer in a step, a push or a checkpoint", "P10")
@pytest.mark.parametrize(
    "at",
    [
        Milestone.JOURNALED,
        Milestone.VERSION_EXPORTED,
        PushMilestone.FROZEN,
        Milestone.CHECKPOINT_SEALED,
        Milestone.CHECKPOINT_RENAMED,
    ],
)
async def test_a_trainer_that_is_told_to_end_commits_what_it_did_and_exits_zero(
    run: Run, at: Moment, fault: FaultRow
) -> None:
    first = 1 if at in ONCE_A_CHECKPOINT else 3
    with LightTrainer(run.config, at, first, "SIGTERM") as victim:
        assert await victim.exit_code() == 0, victim.output
    fault.fired = True
    done = len(run.journal())
    assert done < STEPS, "it was told to in the middle of the run"
    books = await run.books()
    assert checkpoints(run.config)[-1] == f"step-{done:08d}"
    assert books.ledger.trained == done * run.config.batch_groups, "nothing waits for a checkpoint"
    queue = RedisQueue(run.store, run.config.run)
    await queue.release_writer(await queue.acquire_writer("someone else", ttl_s=5))
    await run.trained(fault)


@pytest.mark.fault("foreign Redis", "P4")
@pytest.mark.parametrize("begun", [False, True], ids=["empty", "with a run of the same name"])
async def test_a_run_that_has_begun_is_refused_by_a_server_that_is_not_its_own_and_leaves_nothing_there(
    run: Run, begun: bool, tmp_path: Path, fault: FaultRow
) -> None:
    with LightTrainer(run.config, Milestone.UPDATED, 5) as victim:
        assert await victim.exit_code() == -signal.SIGKILL, victim.output
    with EmbeddedRedis(tmp_path / "foreign") as server:
        foreign = run.config.redis.model_copy(update={"url": server.url})
        async with connected(server.url) as store:
            if begun:
                await RedisQueue(store, run.config.run).name_server("another")
            before = await contents(store)
            with LightTrainer(run.config.model_copy(update={"redis": foreign})) as misled:
                assert await misled.exit_code() == REFUSED, misled.output
            assert "ForeignServer" in misled.output
            assert await contents(store) == before
    await run.trained(fault)


@pytest.mark.fault("Redis restored from an older backup", "P2")
async def test_a_run_is_refused_by_data_of_its_server_that_would_have_it_train_groups_again(
    model_dir: Path, tmp_path: Path, fault: FaultRow
) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        async with connected(server.url, outage_s=30) as store:
            config = light_config(tmp_path, store.config, "restored", model_dir)
            async with replicating(LightReplica(store, config, tmp_path)) as replica:
                run = Run(config, store, replica)
                with LightTrainer(config, Milestone.CHECKPOINT_SEALED, 1) as victim:
                    assert await victim.exit_code() == -signal.SIGKILL, victim.output
                older = copied(server, tmp_path / "older")
                await run.trained(fault)
            newer = copied(server, tmp_path / "newer")
            await asyncio.to_thread(put_back, server, older)
            found = await contradictions(config.run_dir, store)
            assert any(line.endswith("(step 1), and would be trained again") for line in found), found
            with LightTrainer(config) as misled:
                assert await misled.exit_code() == REFUSED, misled.output
            had = STEPS // 2 * config.batch_groups
            assert "OlderServer: run restored: " in misled.output
            assert f"counts 0 trained groups, and had {had} at the checkpoint of step {STEPS}" in misled.output
            await asyncio.to_thread(put_back, server, newer)
            await run.books()


def copied(server: EmbeddedRedis, to: Path) -> Path:
    """The server's data, as an operator copies them while it runs."""
    to.mkdir()
    for path in append_only_files(server):
        (to / path.name).write_bytes(path.read_bytes())
    return to


def put_back(server: EmbeddedRedis, copy: Path) -> None:
    """The server is killed, and started on those data."""
    os.kill(server.pid, signal.SIGKILL)
    for path in append_only_files(server):
        path.write_bytes((copy / path.name).read_bytes())
    server.start()


def append_only_files(server: EmbeddedRedis) -> list[Path]:
    return [path for path in server.directory.rglob("*.aof*") if path.is_file()]


async def contents(store: RedisStore) -> list[bytes]:
    return sorted(await store.command("KEYS", "*"))


def oversized() -> Group:
    """With a sample longer than the policy's context."""
    group, long = a_group(4), a_segment(OVERSIZED)
    long.response_ids_T[:] = 1
    return replace(group, samples_G=(Sample((long,), "long"), *group.samples_G[1:]))


def of_foreign_tokens() -> Group:
    """That the policy's vocabulary does not have."""
    group = a_group(4)
    group.samples_G[0].segments[0].response_ids_T[0] = 2**31 - 1
    return group


@pytest.mark.fault("experience that no policy can compute", "P9")
@pytest.mark.parametrize(
    ("odd", "reason"),
    [(oversized, f"{OVERSIZED + 3} tokens"), (of_foreign_tokens, "token id 2147483647")],
    ids=["oversized", "foreign tokens"],
)
async def test_a_group_that_would_end_the_trainers_workers_is_dead_and_its_batch_is_filled_up(
    run: Run, odd: Callable[[], Group], reason: str, fault: FaultRow
) -> None:
    run.replica.odd = [odd(), odd()]
    await run.trained(fault)
    letters = await RedisQueue(run.store, run.config.run).dead_letters()
    assert [reason in letter.reason for letter in letters] == [True, True]
    assert (await run.books()).ledger.dead == 2


def checkpoints(config: TrainConfig) -> list[str]:
    return sorted(path.name for path in (config.run_dir / "checkpoints").glob("step-*"))
