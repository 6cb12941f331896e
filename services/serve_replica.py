"""What Ray Serve keeps of this replica around the deployment, for which it has no public interface."""

from typing import Any

import ray


def serve_replica() -> Any | None:
    """Serve's own object; None outside a replica."""
    worker = ray._private.worker.global_worker
    actor = worker.actors.get(worker.actor_id)
    return getattr(actor, "_replica_impl", None)
