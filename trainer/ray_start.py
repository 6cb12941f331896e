"""Ray on this machine, where Ray itself gives its processes half a minute to come up and no setting for it."""

from typing import Any

import psutil

_SLOW = "timed out during startup"
_TRIES = 3


def start_local_ray(**arguments: Any) -> None:
    """`ray.init` of a cluster of this process's own, tried again where it is the machine that is slow. Raises what Ray
    raises, after which nothing of it is left running."""
    import ray

    for tries_left in reversed(range(_TRIES)):
        others = set(psutil.Process().children(recursive=True))
        try:
            ray.init(address="local", **arguments)
        except Exception as error:
            for process in set(psutil.Process().children(recursive=True)) - others:
                process.kill()
            if _SLOW not in str(error) or not tries_left:
                raise
        else:
            return
