"""Fixtures of every tier: one Redis and ONE fleet for the whole session, both real."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import StoreUnavailable
from tests.running_fleet import RunningFleet, run_fleet

# How long one example takes says more about the machine's other work than about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

BENCH = Path(__file__).parent / "bench"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So shells start what they put into the background, and what is started here would inherit it and know no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server for the whole session; tests keep apart by the name of their run."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
    except StoreUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def single_rank() -> Iterator[None]:
    """The training group of a policy in this process. One for all tests: DeepSpeed keeps the first that it meets."""
    import torch.distributed as dist

    from trainer.policy import join_group

    join_group(0, 1, dist.HashStore(), device="cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """`nightshift serve` in a process of its own: a tiny Qwen3 policy, float32, one replica that may become two."""
    directory: Path = tmp_path_factory.mktemp("fleet")
    with run_fleet(directory) as running:
        yield running


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a bench module by name; they import one another as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield _load
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == BENCH:
            del sys.modules[name]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
