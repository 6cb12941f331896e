"""Acknowledged data is destroyed on the server: the auditor names what is missing, and nothing is trained twice."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_queue import RedisQueue
from rollout.types import GroupState, Purpose
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request, connected
from trainer.checkpoint import CheckpointStore, TrainerState
from trainer.errors import ForeignServer
from trainer.journal import Journal, JournalEntry
from trainer.known_server import check_age, check_server, keep_server

BLOCK = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running


@dataclass
class Run:
    """What a trainer does with its queue and its directory, without the training."""

    queue: RedisQueue
    directory: Path
    token: int = 0
    cursor: int = 0
    step: int = 0

    @property
    def _checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.directory / "checkpoints", keep=2)

    async def claim(self) -> None:
        await check_server(self.queue, self.directory, where="the server")
        self.token = await self.queue.acquire_writer("trainer", ttl_s=60)
        await keep_server(self.queue, self.directory)
        if (checkpoint := self._checkpoints.newest()) is not None:
            await check_age(self.queue, self.directory, checkpoint.state, where="the server")

    async def submit(self) -> list[str]:
        """A block of its prompts."""
        key = f"feed:{self.queue.run}:{self.cursor}"
        groups = await self.queue.submit([a_request(i) for i in range(BLOCK)], idempotency_key=key)
        self.cursor += BLOCK
        return list(groups.group_ids)

    async def train(self) -> list[str]:
        """A journaled step of a block."""
        for lease in await self.queue.lease("engine", count=BLOCK, lease_s=60, purposes=[Purpose.TRAIN]):
            await self.queue.complete(lease, a_group())
        ids = [found.group_id for found in await self.queue.lease_experience(self.token, count=BLOCK)]
        self.step += 1
        journal = Journal(self.directory / "journal.jsonl")
        journal.append(JournalEntry(self.step, self.step, tuple(ids), (), (), 0))
        journal.close()
        return ids

    async def checkpoint(self, ids: list[str]) -> None:
        """With the groups of its last step, which leave the queue."""

        async def write(path: Path) -> None:
            (path / "policy" / "model.safetensors").write_bytes(b"weights")

        async def confirm() -> None:
            pass

        ledger = asdict(await self.queue.ledger())
        state = TrainerState(self.step, self.cursor, 0, settled_ids=tuple(ids), fencing_token=self.token, ledger=ledger)
        await self._checkpoints.save(state, write, confirm)
        await self.queue.settle(self.token, ids, GroupState.TRAINED)


def append_only_file(server: EmbeddedRedis) -> Path:
    """Where the server writes now: one file on 6.2, the newest increment on later ones."""
    files = [*server.directory.rglob("*.aof"), *server.directory.rglob("*.incr.aof")]
    return max(files, key=lambda file: file.stat().st_mtime_ns)


async def restarted_without(server: EmbeddedRedis, kept: int) -> None:
    """Killed, its file cut in the middle of the record that begins at byte `kept`, and started again."""
    file = append_only_file(server)
    os.kill(server.pid, signal.SIGKILL)
    with file.open("r+b") as opened:
        opened.truncate(kept + 7)
    await asyncio.to_thread(server.start)


@pytest.mark.fault("truncated AOF tail", "P2", destroys=True)
async def test_a_cut_append_only_file_costs_what_its_tail_held_and_the_auditor_names_it(
    server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    directory = tmp_path / "runs" / "cut"
    async with connected(server.url, outage_s=30) as store:
        run = Run(RedisQueue(store, "cut"), directory)
        directory.mkdir(parents=True)
        await run.claim()
        await run.submit()
        await run.checkpoint(await run.train())
        kept = append_only_file(server).stat().st_size
        lost = await run.submit()
        trained = await run.train()
        await run.checkpoint(trained)
        assert trained == lost
        assert await contradictions(directory, store) == []
        with fault.recovery():
            await restarted_without(server, kept)
            found = await contradictions(directory, store)
        fault.lost, fault.named = len(lost), found
        assert {gid for gid in lost if any(gid in line for line in found)} == set(lost)
        assert "P1: the run's prompts 4 to 7 were submitted and are unknown to the server" in found
        assert all(line.startswith("P1: ") for line in found), found
        assert "P1: the server counts 4 accepted, and had 8 at the checkpoint of step 2" in found
        assert len(found) == len(lost) + 2
        await run.claim()  # the same server, so the run may go on
        assert await run.train() == []


@pytest.mark.fault("flushed Redis", "P2", destroys=True)
async def test_a_flushed_server_is_refused_and_the_auditor_names_all_that_the_run_knew(
    server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    directory = tmp_path / "runs" / "flushed"
    directory.mkdir(parents=True)
    async with connected(server.url) as store:
        run = Run(RedisQueue(store, "flushed"), directory)
        await run.claim()
        ids = await run.submit()
        await run.checkpoint(await run.train())
        with fault.recovery():
            await store.command("FLUSHALL")
            with pytest.raises(ForeignServer):
                await run.claim()
        found = await contradictions(directory, store)
        fault.lost, fault.named = len(ids), found
        assert any(line.startswith("P1: the run used server") for line in found)
        assert {gid for gid in ids if any(gid in line for line in found)} == set(ids)
        assert "P1: the run's prompts 0 to 3 were submitted and are unknown to the server" in found


@pytest.mark.fault("AOF cut before a settle", "P2")
@pytest.mark.parametrize("generated", [True, False], ids=["scored", "queued"])
async def test_groups_whose_settling_was_lost_are_settled_by_the_next_start(
    server: EmbeddedRedis, tmp_path: Path, generated: bool, fault: FaultRow
) -> None:
    directory = tmp_path / "runs" / "behind"
    directory.mkdir(parents=True)
    async with connected(server.url, outage_s=30) as store:
        run = Run(RedisQueue(store, "behind"), directory)
        await run.claim()
        await run.submit()
        submitted = append_only_file(server).stat().st_size
        ids = await run.train()
        scored = append_only_file(server).stat().st_size
        await run.checkpoint(ids)
        with fault.recovery():
            await restarted_without(server, scored if generated else submitted)
        # what the checkpoint contains was never settled here: the next start settles it, and until then it is no loss
        assert await contradictions(directory, store) == []
        await run.claim()
        assert await run.queue.settle(run.token, ids, GroupState.TRAINED) == BLOCK
        assert await contradictions(directory, store) == []
