"""`nightshift demo`: a small policy learns on the idle seats of a live fleet, while users are served from it.

policy -> fleet -> users alone -> trainer, users, a burst that adds a replica -> report -> goals
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.config import NightshiftConfig
from deploy.demo.asked import Asked, read_arguments
from deploy.demo.display import Display
from deploy.demo.goals import FULL_STEPS
from deploy.demo.memory import PeakMemory
from deploy.demo.models import build_models
from deploy.demo.observer import Observer
from deploy.demo.run_state import Run, Seen
from deploy.demo.settings import demo_config
from deploy.demo.task import held_out, prompt_of, write_splits
from deploy.demo.terminal import own_terminal
from deploy.demo.traffic import SETTLING, WITH, WITHOUT, Traffic
from deploy.demo.trainer_process import TrainerProcess
from deploy.local import LocalFleet
from deploy.preflight import check_port
from deploy.processes import Tree
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore

_LOG = "demo.log"
"""What frameworks print; with --debug they print to the terminal."""
_SETTLE_S = 3.0
"""The first requests after the start of an engine are slow."""
_USERS_ALONE_S = 10.0
_USERS_ALONE_BRIEFLY_S = 3.0
"""In runs too short to learn, which only show that everything works."""
_USER_RATE = 2.0
"""Requests a second."""
_USERS_AT_ONCE = 12
"""Few of the engine's seats: it is to have some for rollouts on a slow machine too."""
_USER_TOKENS = 24
"""Of every answer: enough to measure the time between tokens, and no more, as clients share the cores with engines."""
_BURST_USERS = 12
_BURST_LIMIT_S = 40.0
_LOOK_S = 1.0
_GRACE_S = 5.0


def main(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """0 when every goal was met, 1 when one was missed, 130 after Ctrl-C. Raises NightshiftError."""
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for noisy in ("httpx", "ray", "ray.serve"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    asked = read_arguments(args, flags)
    gateway = asked.settings.fleet.gateway
    check_port(gateway.host, gateway.port)
    with (
        asked.claim(),
        nullcontext(sys.stdout) if args.debug else own_terminal(asked.directory / _LOG) as terminal,
    ):
        console = Console(file=terminal, highlight=False)
        return _in_a_tree(lambda tree: _shown(asked, console, tree), console, resuming=asked.resuming)


def _in_a_tree(work: Callable[[Tree], int], console: Console, *, resuming: str) -> int:
    """Whatever happens, every process that the work started has ended afterwards."""
    tree = Tree()
    tree.mark()
    try:
        return work(tree)
    except KeyboardInterrupt:
        console.print(f"\nStopped. `{resuming}` continues from the newest checkpoint.", soft_wrap=True)
        return 130
    finally:
        tree.end(grace_s=_GRACE_S)
        tree.unmark()


def _shown(asked: Asked, console: Console, tree: Tree) -> int:
    with Display(console) as display, PeakMemory(tree.members) as memory:
        return _demo(Run(asked, display), memory)


def _demo(run: Run, memory: PeakMemory) -> int:
    from deploy.demo.report import build_report, conclude

    started = time.monotonic()
    asked, recipe = run.asked, run.asked.recipe
    with run.phase("models", "models: building and warming up (cached afterwards)"):
        models = build_models(
            asked.settings.demo.warmup,
            reward_model=recipe is not None and recipe.has_reward_model,
            progress=run.display.update,
        )
    prompts = write_splits(asked.directory / "prompts", train_size=4096)
    config, files = demo_config(
        asked.directory, models=models, prompts=prompts, steps=asked.steps, flags=asked.flags, recipe=recipe
    )
    with run.phase("fleet", "fleet: starting"):
        fleet = LocalFleet(config, progress=lambda what: run.display.say(f"fleet: {what}")).start()
    try:
        seen = asyncio.run(_live(run, config, files, fleet))
    finally:
        with run.phase("stop", "fleet: stopping"):
            fleet.stop()
    run.wall_s["total"] = time.monotonic() - started
    report = build_report(run, config, seen, peak_memory_gib=memory.peak_gib)
    return conclude(report, run, config, seen)


async def _live(run: Run, config: NightshiftConfig, files: Sequence[Path], fleet: LocalFleet) -> Seen:
    """Everything between a healthy fleet and the end of training."""
    store = await RedisStore.connect(fleet.redis)
    prompts = [prompt_of(entry) for entry in held_out()]
    traffic = Traffic(fleet.url, fleet.tokens.user, config.model.name, prompts, max_tokens=_USER_TOKENS)
    observer = Observer(RedisBoard(store), config.fleet_name, run.asked.directory / "metrics.jsonl")
    stream = asyncio.create_task(traffic.stream(_USER_RATE, at_once=_USERS_AT_ONCE))
    try:
        with run.phase("users_alone", "users alone: the baseline of their latency"):
            await asyncio.sleep(_SETTLE_S)
            traffic.phase = WITHOUT
            await asyncio.sleep(_USERS_ALONE_S if run.asked.steps >= FULL_STEPS else _USERS_ALONE_BRIEFLY_S)
            traffic.phase = SETTLING
        await observer.look()
        with run.phase("training", "training on the seats that users leave free"):
            await _train(run, files, fleet, observer, traffic)
        queue = RedisQueue(store, config.run)
        await _ended(stream)
        return Seen(observer, traffic, await queue.ledger(), await queue.audit())
    finally:
        await _ended(stream)
        await traffic.close()
        await store.close()


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _train(run: Run, files: Sequence[Path], fleet: LocalFleet, observer: Observer, traffic: Traffic) -> None:
    """The trainer from start to end, watched; meanwhile a burst of users makes Serve add a replica."""
    url = str(fleet.redis.url)
    flags = ["--train.ray_address", fleet.ray_address, *run.asked.flags]
    most = fleet.config.autoscaling.max_replicas
    with TrainerProcess(files, flags, run.asked.directory / "trainer.log", redis_url=url) as trainer:
        burst = asyncio.create_task(_burst(traffic, lambda: observer.replicas_now >= most))
        try:
            while not trainer.finished():
                await asyncio.sleep(_LOOK_S)
                await observer.look()
                traffic.phase = WITH if observer.tok_s > 0 else SETTLING
                done = len(observer.steps)
                evaluating = "held-out evaluation · " if done >= run.asked.steps else ""
                run.display.update(done, run.asked.steps, evaluating + status_line(observer, traffic))
            await observer.look()
        finally:
            await _ended(burst)


async def _burst(traffic: Traffic, enough: Callable[[], bool]) -> None:
    if not enough():
        await traffic.burst(_BURST_USERS, enough, limit_s=_BURST_LIMIT_S)


def status_line(observer: Observer, traffic: Traffic) -> str:
    """Reward, staleness, harvested tok/s, replicas and the newest users' TTFT."""
    newest: dict[str, Any] = observer.steps[-1] if observer.steps else {}
    ttft = [t.ttft_s for t in traffic.timings[-20:] if not t.error]
    parts = [
        f"reward {newest['reward_mean']:.2f}" if "reward_mean" in newest else "",
        f"staleness {newest['staleness_mean']:.2f}" if "staleness_mean" in newest else "",
        f"{observer.tok_s:,.0f} tok/s harvested",
        f"{observer.replicas_now} replica(s)",
        f"users' TTFT {1000 * sum(ttft) / len(ttft):.0f} ms" if ttft else "",
    ]
    return " · ".join(part for part in parts if part)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
