"""Groups of one submission as they finish, as NDJSON lines or server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.errors import StoreUnavailable
from rollout.queue import RolloutQueue
from services.sample_views import counts, group_view, is_finished, samples_json

Format = Literal["ndjson", "sse"]
MEDIA_TYPES: dict[Format, str] = {"ndjson": "application/x-ndjson", "sse": "text/event-stream"}
HEARTBEAT_S = 10.0
_FASTEST_S, _SLOWEST_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """One message of a stream: `group` (a GroupSamples), `heartbeat`, or the last one, `end`."""

    kind: Literal["group", "heartbeat", "end"]
    data: dict[str, Any]
    samples: str | None = None
    """The JSON array of a group's samples, which is too long to be built on the event loop."""

    def encode(self, form: Format) -> bytes:
        if form == "ndjson":
            return (self._json({"event": self.kind, **self.data}) + "\n").encode()
        if self.kind == "heartbeat":
            return b": still waiting\n\n"
        return f"event: {self.kind}\ndata: {self._json(self.data)}\n\n".encode()

    def _json(self, data: dict[str, Any]) -> str:
        text = json.dumps(data)
        return text if self.samples is None else f'{text[:-1]}, "samples": {self.samples}}}'


async def as_they_finish(
    queue: RolloutQueue,
    group_ids: Sequence[str],
    *,
    wait_s: float,
    clock: Callable[[], float],
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[Event]:
    """Every group once, when it has its samples or its end; ends after all, or after `wait_s` with `complete` false."""
    open_groups = {gid: i for i, gid in enumerate(group_ids)}
    started = spoke = clock()
    pause = _FASTEST_S
    while open_groups:
        finished = await _finished(queue, list(open_groups))
        for gid in finished:
            (status,) = await queue.status([gid], with_groups=True)
            samples = await asyncio.to_thread(samples_json, status)
            yield Event("group", group_view(gid, open_groups.pop(gid), status).model_dump(), samples)
        now = clock()
        if not open_groups or now - started >= wait_s:
            break
        if finished:
            spoke, pause = now, _FASTEST_S
        elif now - spoke >= heartbeat_s:
            spoke = now
            yield Event("heartbeat", {"waiting": len(open_groups)})
        await asyncio.sleep(min(pause, max(0.0, wait_s - (now - started))))
        pause = min(_SLOWEST_S, pause * 1.5)
    statuses = await queue.status(list(group_ids))
    yield Event("end", {"complete": not open_groups, "counts": counts(statuses)})


async def _finished(queue: RolloutQueue, group_ids: list[str]) -> list[str]:
    statuses = await queue.status(group_ids)
    return [gid for gid, status in zip(group_ids, statuses, strict=True) if is_finished(status)]


async def encoded(events: AsyncIterator[Event], form: Format) -> AsyncIterator[bytes]:
    """The stream's bytes; a store that goes away ends it with an incomplete `end`."""
    try:
        async for event in events:
            yield event.encode(form)
    except StoreUnavailable:
        yield Event("end", {"complete": False, "counts": {}, "reason": "the queue's store does not answer"}).encode(
            form
        )
