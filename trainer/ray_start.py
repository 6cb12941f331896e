"""Ray on this machine and for it alone, where Ray itself gives its processes half a minute to come up and no setting
for it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from trainer.ray_token import check_authentication, keep_token_private

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a process whose Ray listens on 127.0.0.1, or that joins one that does. Ray takes `_node_ip_address` of
127.0.0.1 for a mistake and listens on every address instead; where it believes that there can be no second node, as
on a desktop, it keeps to it."""
_SLOW = "timed out during startup"
_TRIES = 3


def keep_to_loopback() -> None:
    """This process, and what it starts, has its Ray on 127.0.0.1 from now on. Before Ray is initialised."""
    os.environ.update(LOOPBACK)
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # it read the variable when it was imported


def start_local_ray(**arguments: Any) -> None:
    """`ray.init` of a cluster of this process's own, which no other machine reaches; tried again where the machine is
    slow. Raises ConfigError where Ray would take whoever comes, and what Ray raises, after which nothing of it is left
    running."""
    import ray

    check_authentication(os.environ)
    keep_token_private(os.environ)
    keep_to_loopback()
    for tries_left in reversed(range(_TRIES)):
        others = set(psutil.Process().children(recursive=True))
        try:
            with sigterm_left_alone():
                ray.init(address="local", **arguments)
        except Exception as error:
            for process in set(psutil.Process().children(recursive=True)) - others:
                process.kill()
            if _SLOW not in str(error) or not tries_left:
                raise
        else:
            return


@contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """Around `ray.init`, in the main thread: whoever handled SIGTERM before decides. Ray's own handler would break its
    start off half-way, and a process whose connection was made half-way crashes when it exits. Ray's C++ has another
    one, which hands the signal on and aborts the process three seconds later, in the middle of a checkpoint."""
    from ray._private import utils

    former = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = former
        if (handler := signal.getsignal(signal.SIGTERM)) is not None:
            signal.signal(signal.SIGTERM, handler)  # Python knows nothing of the one in C++: it is replaced
