"""Whether the server is the one that a run has always used.

Server and run directory keep the same random name. Trained on with another server, or with one that lost its data, a
run would take the numbers of that one's groups, versions and writers for its own.
"""

import json
import secrets
from pathlib import Path

from rollout.durable import write_text
from rollout.redis_queue import RedisQueue
from trainer.checkpoint import complete_checkpoints
from trainer.errors import ForeignServer

_FILE = "server.json"


def known_server(run_dir: Path) -> str | None:
    """The name that a run's directory keeps; None where no trainer has met a server yet. Raises ForeignServer where the
    file is damaged."""
    path = run_dir / _FILE
    if not path.exists():
        return None
    try:
        return str(json.loads(path.read_text())["identity"])
    except (ValueError, KeyError, TypeError) as error:
        raise ForeignServer(
            f"{path} does not say which server the run used: {error!r}; restore it, or delete it"
        ) from error


async def check_server(queue: RedisQueue, run_dir: Path, *, where: str) -> None:
    """Raises ForeignServer where a run that has begun is to go on with a server that does not know it; `where` that is.

    A run from before servers had names takes the one that it finds, as one that has not begun does.
    """
    known, found = known_server(run_dir), await queue.identity()
    if known is not None and known != found and _begun(run_dir):
        problem = "knows nothing of it" if found is None else "is not the server that it used"
        raise ForeignServer(
            f"run {queue.run}: {where} {problem}: {run_dir / _FILE} says {known}, the server {found or 'nothing'}. Give"
            " the address of its own (redis.url, redis.dir), or restore that one's data; `nightshift audit --run"
            f" {queue.run}` says what is missing. To train on from its newest checkpoint without what was in the queue,"
            " begin another --run with model.path at its policy/"
        )
    if found is None:
        found = await queue.name_server(known or secrets.token_hex(8))
    if found != known:
        write_text(run_dir / _FILE, json.dumps({"identity": found}))


def _begun(run_dir: Path) -> bool:
    journal = run_dir / "journal.jsonl"
    return bool(complete_checkpoints(run_dir / "checkpoints")) or (journal.exists() and journal.stat().st_size > 0)
