"""Two terminals: `nightshift serve` in one, `nightshift train` in the other, everything by configuration.

Each policy meets what happens to real runs: Redis and the trainer are killed and started again, the fleet goes away
and comes back, and users are served meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from rollout.queue import Ledger
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.audited import contradictions
from tests.running_fleet import TESTS, RunningFleet, run_fleet

BATCH, STEPS, EVERY = 4, 8, 3
LONG, _AHEAD = 48, 8
"""Steps of a run that is to outlast a fleet, and what may wait for it in the queue at most."""

TRAIN = """
[train]
runs_dir = "{runs}"
steps = {steps}
batch_groups = {batch}
writer_ttl_s = 4.0
[train.prompts]
train = "{prompts}"
eval = "{prompts}"
[train.reward]
name = "vowels"
[train.sampling]
n = 4
max_tokens = 12
[train.optimizer]
lr = 1e-3
[train.checkpoint]
every = {every}
[train.evaluation]
n = 1
max_prompts = 4
"""


class Trainer:
    """`nightshift train` as a user starts it."""

    def __init__(self, toml: Path, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "train", "-c", str(toml)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=TESTS.parent,
                env={name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            )

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 480.0) -> int:
        return self._process.wait(timeout_s)

    def until(self, done: Callable[[], bool], what: str, timeout_s: float = 480.0) -> None:
        """Poll the run's files; fails when the trainer ends or the time is over before."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert self._process.poll() is None, f"the trainer ended before {what}: {self._log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:g} s: {self._log.read_text()[-4000:]}"
            time.sleep(0.1)

    @property
    def output(self) -> str:
        return self._log.read_text()


@contextmanager
def trainer(toml: Path, log: Path) -> Iterator[Trainer]:
    running = Trainer(toml, log)
    try:
        yield running
    finally:
        running.send(signal.SIGTERM)
        running.wait(60)


def add_training(fleet_toml: Path, directory: Path, prompts: Path, *, steps: int = STEPS) -> Path:
    """One file for both commands, as the documentation shows."""
    toml = directory / "run.toml"
    train = TRAIN.format(runs=directory / "runs", prompts=prompts, steps=steps, batch=BATCH, every=EVERY)
    toml.write_text(fleet_toml.read_text() + train)
    return toml


def records(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def steps_done(run: Path) -> int:
    return max((record["step"] for record in records(run / "metrics.jsonl")), default=0)


async def kill_redis(fleet: RunningFleet) -> None:
    """The server goes without a last word; whoever keeps the fleet starts it again over the same data."""
    store = await RedisStore.connect(fleet.redis)
    try:
        pid = int((await store.command("INFO", "server"))["process_id"])
    finally:
        await store.close()
    os.kill(pid, signal.SIGKILL)


async def audited_ledger(fleet: RunningFleet, run: Path) -> Ledger:
    """Its counters, once the auditor has nothing to say."""
    store = await RedisStore.connect(fleet.redis)
    try:
        assert await contradictions(run, store) == []
        return await RedisQueue(store, fleet.config.run).ledger()
    finally:
        await store.close()


def ask_as_a_user(fleet: RunningFleet) -> None:
    """Completions and chat, streamed and not, by the unchanged client."""
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=fleet.tokens.user, max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "spell this word"}]
    for stream in (False, True):
        text: Any = client.completions.create(model=model, prompt="the quick", max_tokens=8, stream=stream)
        chat: Any = client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=stream)
        if stream:
            assert [chunk.choices[0].finish_reason for chunk in text][-1] in {"stop", "length"}
            assert [chunk.choices[0].finish_reason for chunk in chat if chunk.choices][-1] in {"stop", "length"}
        else:
            assert text.usage.completion_tokens >= 1
            assert chat.choices[0].message.role == "assistant"


def check_account(run: Path, *, steps: int = STEPS) -> None:
    """Every version is new, every push was verified by logprobs, every step is in the metrics."""
    pushes = records(run / "pushes.jsonl")
    versions = [push["version"] for push in pushes]
    assert versions == sorted(set(versions)), "a version number was used twice"
    verdicts = [replica for push in pushes for replica in push["replicas"].values()]
    assert verdicts
    assert all(verdict["verified"] and verdict["canary_gap"] <= 0.05 for verdict in verdicts)
    assert {record["step"] for record in records(run / "metrics.jsonl")} == set(range(1, steps + 1))


@pytest.mark.timeout(1500)
async def test_an_untied_llama_trains_through_a_killed_redis_and_trainer_while_users_are_served(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"one two three {i}", "topic": "counting"}) + "\n" for i in range(9))
    )
    with run_fleet(tmp_path, architecture="llama_untied", max_replicas=1) as fleet:
        toml, run, log = (
            add_training(fleet.toml, tmp_path, prompts),
            tmp_path / "runs" / "default",
            tmp_path / "train.log",
        )
        with trainer(toml, log) as first:
            first.until(lambda: steps_done(run) >= 1, "first step")
            await kill_redis(fleet)
            first.until(lambda: steps_done(run) >= EVERY + 1, "step after the first checkpoint")
            first.send(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
        ask_as_a_user(fleet)
        before = [push["version"] for push in records(run / "pushes.jsonl")]
        with trainer(toml, log) as second:
            second.until(lambda: len(records(run / "pushes.jsonl")) > len(before), "push after the restart")
            ask_as_a_user(fleet)
            assert second.wait() == 0, second.output[-4000:]
        assert "resuming" in log.read_text()
        check_account(run)
        ledger = await audited_ledger(fleet, run)
    assert ledger.trained == STEPS * BATCH
    assert ledger.dead == 0


@pytest.mark.timeout(1800)
async def test_a_qwen2_with_biases_trains_through_a_restart_of_the_fleet(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"spell the word number {i}"}]} for i in range(9)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, log = tmp_path / "runs" / "default", tmp_path / "train.log"
    with run_fleet(tmp_path, architecture="qwen2_biases", max_replicas=1) as fleet:
        training = trainer(add_training(fleet.toml, tmp_path, prompts, steps=LONG), log)
        running = training.__enter__()
        running.until(lambda: steps_done(run) >= 2, "second step")
    try:
        assert steps_done(run) < LONG - _AHEAD, "the run had what it needs before the fleet was gone"
        with run_fleet(tmp_path, architecture="qwen2_biases", max_replicas=1) as fleet:
            ask_as_a_user(fleet)
            assert running.wait() == 0, running.output[-4000:]
            check_account(run, steps=LONG)
            ledger = await audited_ledger(fleet, run)
    finally:
        training.__exit__(None, None, None)
    assert ledger.trained == LONG * BATCH
    assert ledger.dead == 0
