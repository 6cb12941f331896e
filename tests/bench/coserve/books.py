"""What rollouts have of their tokens, by the queue's own records: a replica that generates something twice counts it
twice, as its engine does, and would never be found out by its own tally."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.codec import decode_partial
from rollout.queue import GroupStatus
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk, assembled, tokens
from rollout.types import TERMINAL_STATES


@dataclass(frozen=True, slots=True)
class Kept:
    """Response tokens."""

    delivered: int
    """Of the groups that came to their end with all samples, since the books were opened."""
    salvaged: int
    """Of the samples of all other groups, as whoever leases those next gets them."""


class Books:
    """Of the groups that it is told of; it remembers those alone that have not come to their end."""

    def __init__(self, store: RedisStore, queue: RedisQueue) -> None:
        self._store = store
        self._queue = queue
        self._open: set[str] = set()
        self._delivered = 0

    def opened(self, group_ids: Sequence[str]) -> None:
        """These were accepted."""
        self._open.update(group_ids)

    async def look(self) -> None:
        """Count the groups that have ended. More often than their records stay (`retain_s`); raises RuntimeError where
        one is gone."""
        waiting = sorted(self._open)
        found = zip(waiting, await self._queue.status(waiting), strict=True)
        ended = [gid for gid, status in found if status is None or status.state in TERMINAL_STATES]
        for gid, status in zip(ended, await self._queue.status(ended, with_groups=True), strict=True):
            self._delivered += delivered_tokens(gid, status)
            self._open.remove(gid)

    async def kept(self) -> Kept:
        """Exact while nothing is leased. Raises what `look` raises, and CodecError for salvage that is damaged."""
        await self.look()
        config, waiting = self._store.config, sorted(self._open)
        keys = [f"{config.namespace}:{{{self._queue.run}}}:salvage:{gid}" for gid in waiting]
        found = await self._store.commands([("HGETALL", key) for key in keys]) if keys else []
        return Kept(self._delivered, sum(map(salvaged_tokens, found)))


def delivered_tokens(gid: str, status: GroupStatus | None) -> int:
    """Of all samples of a group that has ended; 0 where it ended without them. Raises RuntimeError where nothing is
    known of it."""
    if status is None:
        raise RuntimeError(f"the record of group {gid} is gone: it ended and was not looked at within `retain_s`")
    if status.group is None:
        return 0
    return sum(len(segment.response_ids_T) for sample in status.group.samples_G for segment in sample.segments)


def salvaged_tokens(chunks: Mapping[bytes, bytes]) -> int:
    """Of one group, by the names of its chunks."""
    named = [Chunk.named(name.decode(), decode_partial(data)) for name, data in chunks.items()]
    return sum(tokens(sample.part) for sample in assembled(named).values())
