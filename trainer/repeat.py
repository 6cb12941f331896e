"""Which journaled steps a resumed run does again, and under which numbers."""

import asyncio
from collections.abc import Sequence, Set

import structlog

from rollout.queue import RolloutQueue
from rollout.types import GroupState
from trainer.journal import Journal, JournalEntry

log = structlog.get_logger(__name__)


async def steps_to_repeat(queue: RolloutQueue, journal: Journal, *, after: int) -> tuple[list[JournalEntry], int]:
    """The journaled steps after the checkpoint of step `after`, and how many were lost with a later checkpoint.

    A checkpoint settles its groups; if it is then damaged, the steps after the one before it have nothing to repeat.
    The journal is renumbered without them.
    """
    entries = journal.after(after)
    kept = await repeatable(queue, entries)
    if lost := len(entries) - len(kept):
        log.warning(
            "journaled steps are not repeated: a checkpoint that cannot be read settled their groups",
            steps=lost,
            after_step=after,
        )
        kept = await asyncio.to_thread(journal.renumber, after, kept)
    journal.forget(after)
    return kept, lost


async def repeatable(queue: RolloutQueue, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """The entries that no lost checkpoint contained."""
    return [entry for entry in entries if not settled_by_checkpoint(await _states(queue, entry.group_ids))]


async def _states(queue: RolloutQueue, group_ids: Sequence[str]) -> set[GroupState | None]:
    """Of groups whose trainer may have been away for longer than their records are kept; None is one that the server
    does not know."""
    known = dict(zip(group_ids, await queue.status(group_ids), strict=True))
    outcomes = await queue.outcomes([gid for gid, status in known.items() if status is None])
    return {*outcomes, *(status.state for status in known.values() if status is not None)}


def settled_by_checkpoint(states: Set[GroupState | None]) -> bool:
    """Whether a checkpoint contained the step whose groups are in these states.

    A step that was skipped settles all of its groups as dead without any checkpoint, and a repetition may drop all of
    them as stale: it is repeated as an empty one, so that every later step keeps its number.
    """
    return GroupState.EXPERIENCE not in states and not states <= {GroupState.DEAD, GroupState.STALE}
