"""Whether Serve has begun to stop this replica.

Serve calls a deployment's `__del__` only when its last request has ended, or never where that takes longer than
`graceful_shutdown_timeout_s`. The actor around the deployment knows from the start, and no public interface says so.
"""

import asyncio
from typing import Any

import ray


def stopping() -> bool:
    """From the moment that Serve lets the requests in flight end; False outside a replica."""
    worker = ray._private.worker.global_worker
    actor = worker.actors.get(worker.actor_id)
    return bool(getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False))


def cancel_once(task: asyncio.Task[Any]) -> None:
    """A second cancel would also end what the task does about the first."""
    if not task.cancelling():
        task.cancel()
