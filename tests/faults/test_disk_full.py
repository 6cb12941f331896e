"""The disk is full: under the server's append-only file, and under a checkpoint."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import StoreUnavailable
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.small_disk import small_disk
from tests.queue_records import a_request, connected
from tests.replay_kit import replay_config, replay_process, result_of, write_recording
from tests.tiny_models import build_policy
from trainer import daemon
from trainer.milestone import Milestone

MOST = 10_000


async def submitted_until_refused(queue: RedisQueue) -> list[str]:
    """Ids of the groups of the calls that had an answer."""
    acknowledged = list[str]()
    with suppress(StoreUnavailable):
        for number in range(MOST):
            groups = await queue.submit([a_request(i) for i in range(8)], idempotency_key=f"mine-{number}")
            acknowledged += groups.group_ids
    return acknowledged


@pytest.mark.fault("disk full under the AOF", "P1")
async def test_what_was_acknowledged_before_the_disk_was_full_is_there_when_it_is_not(
    tmp_path: Path, fault: FaultRow
) -> None:
    with small_disk(tmp_path / "disk", megabytes=16) as disk, EmbeddedRedis(disk.path / "redis") as server:
        async with connected(server.url, outage_s=0.5) as store:
            disk.fill(left=100_000)
            acknowledged = await submitted_until_refused(RedisQueue(store, "full"))
        assert 0 < len(acknowledged) < 8 * MOST
        disk.clear()
        with fault.recovery():
            await asyncio.to_thread(server.start)
            async with connected(server.url) as store:
                books = await RedisBooks(store, "full").books()
                # the call without an answer is sent again
                again = await RedisQueue(store, "full").submit(
                    [a_request(i) for i in range(8)], idempotency_key=f"mine-{len(acknowledged) // 8}"
                )
        fault.lost = len([gid for gid in acknowledged if not books.known(gid)])
        fault.duplicated = len(set(again.group_ids) & set(acknowledged))
    assert fault.lost == fault.duplicated == 0
    assert books.recount() == books.ledger
    assert books.ledger.balance == 0
    assert len(acknowledged) <= books.ledger.accepted <= len(acknowledged) + 8


@pytest.mark.fault("disk full under a checkpoint", "P4")
async def test_a_replay_whose_checkpoint_finds_no_room_goes_on_from_the_one_before(
    single_rank: None, tmp_path: Path, fault: FaultRow
) -> None:
    recording = write_recording(tmp_path / "source.rec")
    model = build_policy(tmp_path / "policy")
    twin = replay_config(tmp_path, model, "twin", recording)
    await daemon._replay(twin, recording)
    with small_disk(tmp_path / "disk", megabytes=64) as disk:
        config = twin.model_copy(update={"run": "full", "runs_dir": disk.path})
        replay_process(config, Milestone.SETTLED, 1)  # the checkpoint of step 3 is there, and the process is killed
        disk.fill(left=200_000)
        code, output = replay_process(config, Milestone.SETTLED, 99)
        assert code not in {0, None}, output
        assert "No space left on device" in output
        assert await contradictions(config.run_dir) == []
        disk.clear()
        with fault.recovery():
            code, output = replay_process(config, Milestone.SETTLED, 99)
        assert code == 0, output
        assert result_of(config) == result_of(twin)
        assert await contradictions(config.run_dir) == []
