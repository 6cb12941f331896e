"""What becomes of the tokens of groups that are too old."""

from rollout.memory_queue import MemoryQueue
from rollout.types import Experience, Purpose
from tests.queue_records import a_group, a_request
from trainer.config import StalenessConfig
from trainer.intake import Intake, add
from trainer.metrics import PushTotals, staleness_metrics
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
