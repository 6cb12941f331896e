"""A fleet started as a user starts one, by `nightshift serve` and a TOML file, and what a test needs to talk to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.announcement import announcement_file
from deploy.config import NightshiftConfig, load
from deploy.tokens import Tokens, read_tokens
from rollout.config import RedisConfig
from services.config import FleetConfig
from tests.ports import free_port
from tests.tiny_models import Architecture, build_policy

START_S = 420.0
STOP_S = 60.0
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class RunningFleet:
    """Everything a client, a trainer or a test of the queue needs."""

    url: str
    tokens: Tokens
    redis: RedisConfig
    """With the address filled in."""
    config: FleetConfig
    toml: Path
    """Its configuration; `nightshift train -c` takes it too, with a [train] table of the test's own."""
    state_dir: Path
    pid: int
    """Of `nightshift serve`."""


def write_toml(
    directory: Path,
    *,
    model: Path,
    port: int,
    run: str = "default",
    min_replicas: int = 1,
    max_replicas: int = 2,
    context: int = 256,
    max_tokens: int = 64,
    more: str = "",
) -> Path:
    """A configuration as small as an engine takes, with a reward of the user's own, and `more` of [fleet].

    Sequences have at most `context` tokens, users' answers at most `max_tokens`.
    """
    path = directory / "nightshift.toml"
    path.write_text(
        f"""
run = "{run}"
state_dir = "{directory / "state"}"

[model]
path = "{model}"

[redis]
dir = "{directory / "redis"}"

[rewards]
python_path = ["{TESTS}"]
[rewards.functions.vowels]
function = "user_reward:share_of_vowels"
timeout_s = 5

[fleet.engine]
dtype = "float32"
max_model_len = {context}
max_num_seqs = 16

[fleet.harvest]
user_reserve = 4
lease_s = 5
salvage_tokens = 16

[fleet.autoscaling]
min_replicas = {min_replicas}
max_replicas = {max_replicas}

[fleet.gateway]
port = {port}
[fleet.gateway.limits]
max_tokens = {max_tokens}
{more}
"""
    )
    return path


@contextmanager
def run_fleet(
    directory: Path,
    *,
    architecture: Architecture = "qwen3_tied",
    min_replicas: int = 1,
    max_replicas: int = 2,
    answers: int = 64,
    more: str = "",
) -> Iterator[RunningFleet]:
    """Start it, wait until it is healthy, and end it; its end is part of what is tested. Users' answers may have
    `answers` tokens."""
    context = max(256, answers + 64)
    model = build_policy(directory / "model", architecture, context=max(512, context))
    replicas = {"min_replicas": min_replicas, "max_replicas": max_replicas}
    toml = write_toml(
        directory, model=model, port=free_port(), context=context, max_tokens=answers, more=more, **replicas
    )
    with run_configured(directory, toml) as fleet:
        yield fleet


@contextmanager
def run_configured(directory: Path, toml: Path) -> Iterator[RunningFleet]:
    """The fleet of a configuration; see `run_fleet`."""
    with start_configured(directory, toml) as (fleet, process):
        yield fleet
        assert process.poll() is None, f"the fleet ended by itself: {serve_log(directory).read_text()[-2000:]}"


@contextmanager
def start_configured(directory: Path, toml: Path) -> Iterator[tuple[RunningFleet, "subprocess.Popen[bytes]"]]:
    """The same for those who end it themselves, or want to know how it ended."""
    log = serve_log(directory)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "serve", "-c", str(toml)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=TESTS.parent,
            env={name: value for name, value in os.environ.items() if name != "REDIS_URL"},
        )
    try:
        yield _wait(process, load([toml]), toml, log), process
    finally:
        _end(process)


def serve_log(directory: Path) -> Path:
    """What a fleet started there prints."""
    return directory / "serve.log"


def _wait(process: "subprocess.Popen[bytes]", settings: NightshiftConfig, toml: Path, log: Path) -> RunningFleet:
    announcement = announcement_file(settings.state_dir, settings.fleet_name)
    deadline = time.monotonic() + START_S
    while not announcement.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"nightshift serve did not become healthy: {log.read_text()[-4000:]}")
        time.sleep(0.2)
    announced = json.loads(announcement.read_text())
    config = settings.fleet_config()
    redis = config.redis.model_copy(update={"url": announced["redis_url"]})
    return RunningFleet(
        url=announced["url"],
        tokens=Tokens(**read_tokens(settings.state_dir)),
        redis=redis,
        config=config.model_copy(update={"redis": redis}),
        toml=toml,
        state_dir=settings.state_dir,
        pid=process.pid,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
