"""Whether the server is the one that a run has always used, as it left it.

Server and run directory keep the same random name. Trained on with another server, or with one that lost its data, a
run would take the numbers of that one's groups, versions and writers for its own; with older data of its own server, it
would train groups again that its weights have learned from.
"""

import asyncio
import json
import secrets
from pathlib import Path

from rollout.durable import write_text
from rollout.redis_queue import RedisQueue
from rollout.types import TERMINAL_STATES
from trainer.checkpoint import TrainerState, complete_checkpoints
from trainer.errors import ForeignServer, OlderServer
from trainer.journal import read_journal

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
    Writes nothing, so that nothing is left on somebody else's."""
    known, found = known_server(run_dir), await queue.identity()
    if known is not None and known != found and _begun(run_dir):
        problem = "knows nothing of it" if found is None else "is not the server that it used"
        raise ForeignServer(
            f"run {queue.run}: {where} {problem}: {run_dir / _FILE} says {known}, the server {found or 'nothing'}. Give"
            " the address of its own (redis.url, redis.dir), or restore that one's data; `nightshift audit --run"
            f" {queue.run}` says what is missing. To train on from its newest checkpoint without what was in the queue,"
            " begin another --run with model.path at its policy/"
        )


async def keep_server(queue: RedisQueue, run_dir: Path) -> None:
    """Server and run know each other from now on. A run from before servers had names takes the one that it finds, as
    one that has not begun does."""
    known, found = known_server(run_dir), await queue.identity()
    if found is None:
        found = await queue.name_server(known or secrets.token_hex(8))
    if found != known:
        write_text(run_dir / _FILE, json.dumps({"identity": found}))


async def check_age(queue: RedisQueue, run_dir: Path, checkpoint: TrainerState, *, where: str) -> None:
    """Raises OlderServer where groups that `checkpoint` contains would be trained again; `where` the server is.

    What the checkpoint itself has to settle is settled at the start, so a server that is older by less than a
    checkpoint's period will do. So will one that lost groups together with their submissions: it hands none of them
    out.
    """
    trained, had = (await queue.ledger()).trained, checkpoint.ledger.get("trained", 0)
    if trained >= had:
        return
    if again := await _open_again(queue, run_dir, checkpoint):
        raise OlderServer(
            f"run {queue.run}: {where} has older data than the run: it counts {trained} trained groups, and had {had}"
            f" at the checkpoint of step {checkpoint.step}; {len(again)} groups that this contains would be trained"
            f" again, {again[0]} for one. `nightshift audit --run {queue.run}` names them all. Restore newer data of"
            " the server, or the run's directory as of these (docs/operations.md, Backup and restore). To train on"
            " without what was in the queue, begin another --run with model.path at the checkpoint's policy/"
        )


async def _open_again(queue: RedisQueue, run_dir: Path, checkpoint: TrainerState) -> list[str]:
    """Groups of the checkpoint's steps that the server would hand out, and that the checkpoint has not to settle."""
    journal, _ = await asyncio.to_thread(read_journal, run_dir / "journal.jsonl")
    history = {entry.step: entry for entry in journal if entry.step <= checkpoint.step}
    settled = {gid for entry in history.values() for gid in entry.group_ids} - {*checkpoint.settled_ids}
    statuses = await queue.status(sorted(settled))
    return [status.group_id for status in statuses if status is not None and status.state not in TERMINAL_STATES]


def _begun(run_dir: Path) -> bool:
    journal = run_dir / "journal.jsonl"
    return bool(complete_checkpoints(run_dir / "checkpoints")) or (journal.exists() and journal.stat().st_size > 0)
