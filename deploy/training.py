"""`nightshift train`: the trainer daemon in the foreground, with the Redis and the Ray it needs."""

import sys
from contextlib import ExitStack

from deploy.config import NightshiftConfig
from deploy.local import check_trainer, enter_redis, running_fleet, start_ray
from deploy.processes import uninterrupted


def train(config: NightshiftConfig) -> int:
    """The daemon's exit code. Raises ConfigError, StoreUnavailable and what the daemon raises."""
    check_trainer(config)
    settings = config.train_config()
    stack = ExitStack()
    try:
        embedded, redis = enter_redis(stack, settings.redis)
        if redis.url is not None and embedded is not None and running_fleet(config.state_dir, settings.fleet) is None:
            print(f"no local fleet {settings.fleet} runs yet: training begins when one does", file=sys.stderr)
        settings = settings.model_copy(update={"redis": redis})
        if settings.ray_address is None:
            workers = settings.workers
            ray = start_ray(stack, num_cpus=2 * workers.world_size * max(workers.cpus, 0.5) + 1, embedded=embedded)
            settings = settings.model_copy(update={"ray_address": ray.address})
        from trainer.daemon import run

        return run(settings)
    finally:
        with uninterrupted():
            stack.close()
