"""Ray for the workers: the one this process already joined, the one at `ray_address`, or an own small one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.config import TrainConfig
from trainer.errors import WorkerDied

_OBJECT_STORE_BYTES = 256 << 20


@contextmanager
def joined_ray(config: TrainConfig) -> Iterator[None]:
    """Raises WorkerDied when Ray does not start; only what was started here is shut down again.

    Ray replaces the handler of SIGTERM, and while it starts it answers the signal by SystemExit.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        try:
            _start(config)
        except Exception as error:  # Ray raises bare exceptions when its own processes do not come up
            raise WorkerDied(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error
        yield
    finally:
        ray.shutdown()


def _start(config: TrainConfig) -> None:
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray_address is not None:
        ray.init(address=config.ray_address, **quiet)
        return
    workers = config.workers
    groups = 2 if config.algorithm.kl_coef > 0 else 1
    ray.init(
        address="local",
        num_cpus=int(groups * workers.world_size * workers.cpus) + 1,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **quiet,
    )
