"""`nightshift train`: the trainer daemon in the foreground, with the Redis and the Ray it needs."""

import sys
from contextlib import ExitStack
from pathlib import Path

from deploy.announcement import running_fleet
from deploy.config import NightshiftConfig, absolute
from deploy.embedded_redis import EmbeddedRedis
from deploy.local import check_trainer, enter_redis, start_ray
from deploy.preflight import check_models
from deploy.processes import uninterrupted
from rollout.errors import ConfigError
from trainer.config import TrainConfig

_SUFFIX = "-replay"
_MAX_NAME = 63


def train(config: NightshiftConfig, *, replay: Path | None = None) -> int:
    """The daemon's exit code. Raises ConfigError, StoreUnavailable and what the daemon raises."""
    if replay is not None:
        return _run_replay(config, absolute(replay))
    check_trainer(config)
    settings = config.train_config()
    stack = ExitStack()
    try:
        embedded, redis = enter_redis(stack, settings.redis)
        if redis.url is not None and embedded is not None and running_fleet(config.state_dir, settings.fleet) is None:
            print(f"no local fleet {settings.fleet!r} runs yet: training begins when one does", file=sys.stderr)
        return _run(stack, settings.model_copy(update={"redis": redis}), embedded=embedded, own_ray=True)
    finally:
        with uninterrupted():
            stack.close()


def _run_replay(config: NightshiftConfig, file: Path) -> int:
    """One rank runs in this process; more of them are Ray actors as in a live run."""
    settings = config.train_config()
    check_models(settings)
    settings = settings.model_copy(update={"run": replay_name(settings.run), "replay": file})
    stack = ExitStack()
    try:
        return _run(stack, settings, embedded=None, own_ray=settings.most_ranks > 1)
    finally:
        with uninterrupted():
            stack.close()


def replay_name(run: str) -> str:
    """The run of a replay, which must not continue the recorded one. Raises ConfigError where it becomes too long."""
    name = run if run.endswith(_SUFFIX) else run + _SUFFIX
    if len(name) > _MAX_NAME:
        raise ConfigError(
            f"run={run}: the replay would be called {name}, of more than {_MAX_NAME} letters; shorten --run"
        )
    return name


def _run(stack: ExitStack, settings: TrainConfig, *, embedded: EmbeddedRedis | None, own_ray: bool) -> int:
    if own_ray and settings.ray_address is None:
        needed = sum(workers.world_size * max(workers.cpus, 0.5) for workers in settings.group_workers.values())
        ray = start_ray(stack, num_cpus=needed + 1, embedded=embedded)
        settings = settings.model_copy(update={"ray_address": ray.address})
    from trainer.daemon import run

    return run(settings)
