"""The soak's trainer is kept going as its systemd unit says."""

import asyncio
import sys
from pathlib import Path

import pytest

from deploy import cli
from tests.soak.supervisor import NOT_AGAIN, RESTART_S, Supervisor, train_command
from tests.unit.test_systemd import UNITS, unit

CRASH_THEN_RUN = """
import pathlib, signal, sys, time
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("runs", flush=True)
time.sleep(60)
"""


def test_restarts_are_those_of_the_unit() -> None:
    service = unit(next(path for path in UNITS if "train" in path.name))["Service"]
    assert float(service["RestartSec"]) == RESTART_S
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == NOT_AGAIN


def test_the_command_is_that_of_a_user(tmp_path: Path) -> None:
    parsed, flags = cli._parser().parse_known_args(train_command(tmp_path / "a.toml")[3:])
    assert (parsed.command, parsed.config, flags) == ("train", [tmp_path / "a.toml"], [])


async def test_a_crash_is_started_again_and_a_stop_is_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    one = Supervisor([sys.executable, "-c", CRASH_THEN_RUN, str(tmp_path / "mark")], log, restart_s=0.1)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(30):
        while not log.exists() or "runs" not in log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        one.stop()
        assert await running == 0
    assert (one.starts, one.pid) == (2, None)


async def test_a_stop_between_two_starts_ends_it(tmp_path: Path) -> None:
    one = Supervisor([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log", restart_s=60)
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(30):
        while one.starts == 0 or one.pid is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        one.stop()
        assert await running == 1


@pytest.mark.parametrize("code", sorted({0, *NOT_AGAIN}))
async def test_what_the_unit_does_not_start_again_ends_the_soak(code: int, tmp_path: Path) -> None:
    one = Supervisor([sys.executable, "-c", f"print('why'); raise SystemExit({code})"], tmp_path / "log")
    with pytest.raises(RuntimeError, match=rf"exit code {code}, which nobody asked for: why"):
        async with asyncio.timeout(30):
            await one.run()
