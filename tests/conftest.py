"""Fixtures of every tier: one Redis and ONE fleet for the whole session, both real."""

import importlib.util
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
from hypothesis import settings

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import StoreUnavailable
from tests.fault_rows import KEY, MARK, FaultRow, problems, row_of, session_problems, table, write_report
from tests.running_fleet import RunningFleet, run_fleet

# How long one example takes says more about the machine's other work than about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

ROW = pytest.StashKey[FaultRow]()
BEGAN = pytest.StashKey[float]()
BENCH = Path(__file__).parent / "bench"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So shells start what they put into the background, and what is started here would inherit it and know no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-report", type=Path, help="write the fault matrix there, and fail where it does not hold")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    config.stash[KEY] = []
    config.stash[BEGAN] = time.monotonic()


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> FaultRow:
    """The test's row in the fault matrix."""
    row: FaultRow = request.node.stash[ROW]
    return row


@pytest.fixture
def command_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets handlers and log levels for its process; here the process goes on."""
    for name in list(os.environ):
        if name.startswith("NIGHTSHIFT_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGTERM, handler)
    logging.disable(logging.NOTSET)
    structlog.reset_defaults()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (row := row_of(item)) is not None:
        item.stash[ROW] = row
        item.config.stash[KEY].append(row)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    row = item.stash.get(ROW, None)
    if row is not None and report.skipped:
        row.skipped = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif row is not None and call.when != "setup":
        row.survived = report.passed and (row.survived or call.when == "call")
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path, rows = session.config.getoption("--faults-report"), session.config.stash[KEY]
    if path is not None:
        wrong = session_problems(rows, int(exitstatus))
        write_report(path, rows, wrong=wrong, seconds=time.monotonic() - session.config.stash[BEGAN])
        if wrong and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if config.getoption("--faults-report") is not None:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(table(config.stash[KEY]))
        for problem in problems(config.stash[KEY]):
            terminalreporter.write_line(problem, red=True)


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
