"""The last process of a local fleet: waits until the main one is gone, then ends what is left of the tree.

Started by `deploy.processes.Guardian` as `python -m deploy.guardian JSON`. Standard input is a pipe whose other end
only the main process holds; the kernel closes it however that process ends.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

from deploy.processes import Tree

_GRACE_S = 5.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    duty = json.loads(sys.argv[1])
    while sys.stdin.buffer.read(4096):
        pass
    Tree(duty["tree"]).end(grace_s=_GRACE_S)
    for path in duty["remove"]:
        shutil.rmtree(path, ignore_errors=True)
    if duty["redis_dir"] is not None:
        _leave_redis(Path(duty["redis_dir"]))


def _leave_redis(directory: Path) -> None:
    """Stop the embedded server unless others still use it."""
    from deploy.embedded_redis import EmbeddedRedis
    from rollout.errors import StoreUnavailable

    server = EmbeddedRedis(directory)
    if not server.is_running:
        return
    try:
        with server:
            pass
    except StoreUnavailable:
        return


if __name__ == "__main__":
    main()
