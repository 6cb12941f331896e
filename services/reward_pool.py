"""Scores finished samples in worker processes with a hard time limit, off the event loop."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import structlog

from rollout.config import RewardEntry, RewardsConfig
from rollout.errors import ConfigError, RewardError
from rollout.rewards import BUILTIN, Reward, RewardInput
from services.reward_environment import reward_environment

_LOAD_TIMEOUT_S = 60.0
_LINE_LIMIT = 64 << 20

_log = structlog.get_logger(__name__)


class RewardPool:
    """`workers` processes; one whose call fails to answer in time is killed with its children, and replaced later."""

    def __init__(self, config: RewardsConfig) -> None:
        builtin = {name: RewardEntry(function=path) for name, path in BUILTIN.items()}
        self._functions: Mapping[str, RewardEntry] = {**builtin, **config.functions}
        self._environment = reward_environment(os.environ, python_path=config.python_path, also=config.environment)
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._workers = [_Worker(self._environment) for _ in range(config.workers)]
        for worker in self._workers:
            self._idle.put_nowait(worker)

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    async def check(self) -> None:
        """Import every configured function once; raises ConfigError naming the first that cannot be."""
        for name, entry in self._functions.items():
            if BUILTIN.get(name) == entry.function:
                continue
            try:
                await self._run(entry, [])
            except RewardError as error:
                raise ConfigError(f"rewards.functions.{name}: {error}") from error

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]:
        """In the order given. Raises RewardError when the name is unknown, or for the first sample that fails."""
        if name not in self._functions:
            raise RewardError(f"reward {name!r} is not configured; known: {', '.join(sorted(self._functions))}")
        return await self._run(self._functions[name], samples)

    async def close(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            await worker.kill()

    async def _run(self, entry: RewardEntry, samples: Sequence[RewardInput]) -> list[Reward]:
        worker = await self._idle.get()
        try:
            return await worker.run(entry, samples)
        except BaseException:
            # replies of this call may still be on their way, so the next call gets a fresh process
            await worker.kill()
            raise
        finally:
            self._idle.put_nowait(worker)


class _Worker:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, entry: RewardEntry, samples: Sequence[RewardInput]) -> list[Reward]:
        process = self._process or await self._start()
        stdin = process.stdin
        if stdin is None:
            raise RewardError("the reward process has no input")
        job = {"function": entry.function, "samples": [_plain(s) for s in samples]}
        try:
            stdin.write(json.dumps(job).encode() + b"\n")
            await self._reply(process, _LOAD_TIMEOUT_S, f"importing {entry.function}")
            return [
                _reward(await self._reply(process, entry.timeout_s, f"{entry.function} of sample {i}"))
                for i in range(len(samples))
            ]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RewardError(f"the reward process of {entry.function} ended") from error

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # a process that ended by itself may have left children; its number stays theirs until the last has gone
        if process.returncode is None or not psutil.pid_exists(process.pid):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.reward_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(self._environment),
            limit=_LINE_LIMIT,
            start_new_session=True,  # a group of its own, so that what a function starts ends with it
        )
        return self._process

    async def _reply(self, process: asyncio.subprocess.Process, timeout_s: float, what: str) -> dict[str, Any]:
        if process.stdout is None:
            raise RewardError("the reward process has no output")
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
        except TimeoutError as error:
            _log.warning("reward_killed", what=what, timeout_s=timeout_s)
            raise RewardError(f"{what} took longer than timeout_s={timeout_s}") from error
        except ValueError as error:
            raise RewardError(f"{what}: reply longer than {_LINE_LIMIT} bytes") from error
        if not line:
            raise RewardError(f"{what}: the reward process ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RewardError(f"{what}: {reply['error']}")
        return reply


def _reward(reply: Mapping[str, Any]) -> Reward:
    return Reward(reply["reward"], reply["breakdown"])


def _plain(sample: RewardInput) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "finish_reason": sample.finish_reason,
        "metadata": dict(sample.metadata),
        "params": dict(sample.params),
        "response_ids": list(sample.response_ids),
    }
