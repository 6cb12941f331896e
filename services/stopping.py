"""Whether Serve has begun to stop this replica.

Serve calls a deployment's `__del__` only when its last request has ended, or never where that takes longer than
`graceful_shutdown_timeout_s`. The actor around the deployment knows from the start, and no public interface says so.
"""

from services.serve_replica import serve_replica


def stopping() -> bool:
    """From the moment that Serve lets the requests in flight end; False outside a replica."""
    return bool(getattr(serve_replica(), "_shutting_down", False))
