"""Serve's log of this replica, which vLLM closes.

vLLM configures `logging` when it is imported, and that closes every handler there is. Serve's gathers lines for a file,
which it then has no more: from there on the replica's log stays empty. Worse, a controller that takes the place of one
that died asks each replica for the name of that file, and stops those that cannot say: the death of a process that no
request passes through would restart every engine.
"""

import logging
from logging.handlers import MemoryHandler

from services.serve_replica import serve_replica

SERVE = "ray.serve"


def reopen_serve_log() -> None:
    """Have Serve configure its log of this replica again where it was closed; nothing outside a replica."""
    replica = serve_replica()
    if replica is not None and _closed(logging.getLogger(SERVE)):
        replica._configure_logger_and_profilers(replica._deployment_config.logging_config)


def _closed(logger: logging.Logger) -> bool:
    return any(isinstance(handler, MemoryHandler) and handler.target is None for handler in logger.handlers)
