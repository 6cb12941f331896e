"""The auditor's word on a run of a test: every promise holds, or what contradicts it."""

from pathlib import Path

from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from trainer.audit import audit
from trainer.run_files import read_run


async def contradictions(run_dir: Path, store: RedisStore | None = None) -> list[str]:
    """Of the run that lives in this directory, by its name; without `store`, as of a replay, of its directory alone."""
    files = read_run(run_dir)
    books = None if store is None else await RedisBooks(store, run_dir.name).books()
    return [f"{found.promise}: {problem}" for found in audit(books, files) for problem in found.problems]


async def audited(run_dir: Path, store: RedisStore) -> RedisQueue:
    """The run's queue, once the auditor has nothing to say."""
    assert await contradictions(run_dir, store) == []
    return RedisQueue(store, run_dir.name)
