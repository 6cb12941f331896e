"""Ray for the workers: the one this process already joined, the one at `ray_address`, or an own small one."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.errors import ConfigError
from trainer.config import TrainConfig
from trainer.errors import WorkerDied
from trainer.ray_start import keep_to_loopback, sigterm_left_alone, start_local_ray

_OBJECT_STORE_BYTES = 256 << 20
_REACH_S = 10.0
_HERE = ("127.0.0.1:", "localhost:")


@contextmanager
def joined_ray(config: TrainConfig) -> Iterator[None]:
    """Raises WorkerDied when Ray does not start; only what was started here is shut down again."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        try:
            _start(config)
        except ConfigError:
            raise
        except Exception as error:  # Ray raises bare exceptions when its own processes do not come up
            raise WorkerDied(f"Ray did not start: {str(error).strip().splitlines()[0]}{_hint(config)}") from error
        yield
    finally:
        ray.shutdown()


def _hint(config: TrainConfig) -> str:
    """A cluster started where a token lies in the home directory asks for it; clients send it only if told."""
    if config.ray_address is None or "RAY_AUTH_MODE" in os.environ:
        return ""
    return ". Where the cluster wants a token (~/.ray/auth_token was there when it started), set RAY_AUTH_MODE=token"


def check_reachable(address: str) -> None:
    """Ray itself would try for a minute. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return  # "auto" and such, which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"train.ray_address={address}: nothing answers there: {error}") from error


def _start(config: TrainConfig) -> None:
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray_address is not None:
        check_reachable(config.ray_address)
        if config.ray_address.startswith(_HERE):
            keep_to_loopback()
        with sigterm_left_alone():
            ray.init(address=config.ray_address, **quiet)
        return
    start_local_ray(
        num_cpus=int(sum(w.world_size * w.cpus for w in config.group_workers.values())) + 1,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **quiet,
    )
