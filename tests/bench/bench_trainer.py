"""`make bench-trainer`: a GRPO step of the trainer beside a bare DeepSpeed loop over the same data, in one run.

    python tests/bench/bench_trainer.py [--rounds 6] [--out runs/bench]
    python tests/bench/bench_trainer.py --device cuda --dtype bfloat16 --size 1.5b --check-packing     `make gpu-check`

Both sides have the same model, optimizer, precision, ZeRO stage, threads and padded micro-batches, and keep the same
logits. The bare loop has its tensors ready and computes one loss; ours starts at scored groups, as the daemon does, and
makes advantages, micro-batches, the configured loss and every metric of a step. They take turns, so that whatever else
the machine does hits both.

Writes trainer.json and trainer.png (trainer-cuda on a GPU). Exits with 1 below the bar, with 2 where there is no such
device. No engine, no Redis, no Ray.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from bare_loop import BareLoop
from environment import machine, versions
from random_groups import groups_of
from random_policy import SIZES, VOCABULARY, filler_tokenizer, random_policy
from safetensors import safe_open
from trainer_figures import (
    BAR,
    GOAL,
    PACKING_TOLERANCE,
    Cost,
    Round,
    packing_gap,
    rates,
    shortfalls,
    step_flops,
    utilisation,
)
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from deploy.demo.display import Display
from rollout.errors import ConfigError
from trainer.batch import MicroBatch
from trainer.config import TrainConfig
from trainer.in_process import InProcessGroup, start_policy
from trainer.minibatch import plan
from trainer.partition import Packing
from trainer.policy import PolicySpec
from trainer.rows import FreshGroup, Row, rows_of
from trainer.step import update
from trainer.workers import Workers

_CACHE = Path("runs/.cache")
_PACKAGES = ("torch", "deepspeed", "transformers")
_SAMPLES = 8
_GIB = 2**30
_NOW = frozenset({0})
"""The version that sampled is the policy as it is."""

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Job:
    """One step's work, the same for both sides."""

    config: TrainConfig
    groups: Sequence[FreshGroup]
    rows: Sequence[Row]

    @property
    def tokens(self) -> int:
        """Of prompts and responses, without padding."""
        return sum(row.length for row in self.rows)

    def batches(self, packing: Packing) -> list[MicroBatch]:
        """As `trainer.step.update` plans them for a group of one rank."""
        (share,) = plan(
            self.rows,
            self.config.algorithm,
            world_size=1,
            max_tokens=self.config.workers.max_tokens_per_micro_batch,
            fixed_length=self.config.sampling.max_tokens,
            seed=self.config.seed,
            step=1,
            packing=packing,
        )
        return share

    def spec(self, packing: Packing) -> PolicySpec:
        """What a rank of the policy is started with."""
        workers = self.config.workers.model_copy(update={"packing": packing})
        return PolicySpec(
            self.config.model.path, workers, self.config.optimizer, self.config.algorithm, self.config.seed
        )


def main() -> int:
    """Measure, write, say what fell short; the exit code."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch sees none, so nothing was measured", file=sys.stderr)
        return 2
    os.environ.setdefault("DS_ACCELERATOR", options.device)  # transformers imports DeepSpeed when it saves a model
    transformers_logging.disable_progress_bar()
    where = machine()
    with Display() as display:
        display.phase(f"random policy, {options.size}")
        job = job_of(options)
        measured = asyncio.run(measure(job, options.rounds, display, check_packing=options.check_packing))
    figures = {"command": sys.argv, "machine": where, "versions": versions(_PACKAGES), **measured}
    _write(figures, options.out / ("trainer" if options.device == "cpu" else f"trainer-{options.device}"))
    failed = shortfalls(figures)
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


def job_of(options: argparse.Namespace) -> Job:
    """Of the command line; builds the random policy where it is not there yet."""
    model = random_policy(_CACHE / f"random-{options.size}", options.size, filler_tokenizer())
    config = _config(options, model)
    tokens = config.sampling.max_tokens
    groups = groups_of(options.groups, n=_SAMPLES, max_tokens=tokens, vocabulary=VOCABULARY, seed=0)
    return Job(config, groups, rows_of(groups, same_weights=_NOW, algorithm=config.algorithm))


async def measure(job: Job, rounds: int, display: Display, *, check_packing: bool) -> dict[str, Any]:
    """`rounds` steps of each side by turns, after one of each to warm up."""
    workers = job.config.workers
    with ExitStack() as stack:
        display.phase("starting the trainer's policy")
        trainer, refusal = await _start_trainer(job)
        stack.callback(trainer.close)
        packing = await _packing(job, trainer, refusal, display) if check_packing else None
        display.phase("warming up")
        peak_gib = await _peak_gib(_trainer_step(job, trainer), workers.device)  # while there is no other model
        bare = InProcessGroup("bare", workers.threads)
        stack.callback(bare.close)
        await bare.start(lambda: BareLoop(job.spec("off"), job.batches("off")))
        await _bare_step(bare)()
        display.phase("steps by turns")
        found = await _by_turns(_trainer_step(job, trainer), _bare_step(bare), rounds, workers.device, display)
    return {**_figures(job, found), "peak_device_gib": peak_gib, "packing": packing}


async def _start_trainer(job: Job) -> tuple[InProcessGroup, str]:
    """The policy as the daemon has it by default, ready for packed rows; or, with the reason, without."""
    try:
        return await start_policy(job.config.workers, job.spec("on")), ""
    except ConfigError as error:
        return await start_policy(job.config.workers, job.spec("off")), str(error)


def _trainer_step(job: Job, policy: InProcessGroup) -> Step:
    """What the daemon does with a collected batch."""

    async def step() -> None:
        done = await update(
            job.groups, step=1, seed=job.config.seed, same_weights=_NOW, config=job.config, workers=Workers(policy)
        )
        if not done.applied:
            raise RuntimeError(f"a step of the bench was not applied: {done.skipped}")

    return step


def _bare_step(bare: InProcessGroup) -> Step:
    async def step() -> None:
        await bare.call("step")

    return step


async def _by_turns(trainer: Step, bare: Step, rounds: int, device: str, display: Display) -> list[Round]:
    """Who begins changes with every round, so that neither is always the one on a warmer machine."""
    found: list[Round] = []
    for number in range(rounds):
        if number % 2:
            second = await _cost(bare, device)
            found.append(Round(await _cost(trainer, device), second))
        else:
            found.append(Round(await _cost(trainer, device), await _cost(bare, device)))
        display.update(number + 1, rounds, f"ratio {found[-1].ratio:.3f}, of CPU time {found[-1].cpu_ratio:.3f}")
    return found


async def _cost(step: Step, device: str) -> Cost:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await step()
    if device == "cuda":
        torch.cuda.synchronize()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


async def _peak_gib(step: Step, device: str) -> float | None:
    """Most device memory that torch held at once during a step; None on a CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    await step()
    return torch.cuda.max_memory_allocated() / _GIB if device == "cuda" else None


async def _packing(job: Job, policy: InProcessGroup, refusal: str, display: Display) -> dict[str, Any]:
    """A padded and a packed update at a learning rate of 0, which leaves the weights as they are."""
    if refusal:
        return {"agree": False, "reason": refusal}
    display.phase("one step padded, one packed")
    padded, packed = [(await policy.dispatch("update", [job.batches(how)], 0.0))[0] for how in ("off", "on")]
    return packing_gap(padded.sums, packed.sums, job.config.workers.dtype)


def _figures(job: Job, rounds: Sequence[Round]) -> dict[str, Any]:
    found = rates(rounds, job.tokens)
    model = AutoConfig.from_pretrained(job.config.model.path)
    parameters = _parameters(job.config.model.path)
    flops = step_flops(
        model,
        parameters=parameters,
        lengths_R=[row.length for row in job.rows],
        predicted=sum(row.trained_tokens for row in job.rows),
    )
    device = _device_name(job.config.workers.device)
    return {
        "device": device,
        "dtype": job.config.workers.dtype,
        "zero_stage": job.config.workers.zero_stage,
        "threads": job.config.workers.threads,
        "parameters": parameters,
        "tokens_per_step": job.tokens,
        "micro_batches": len(job.batches("off")),
        **found,
        "bar": BAR,
        "goal": GOAL,
        "trainer_mfu": utilisation(flops, job.tokens / found["trainer_tok_s"], device),
        "bare_mfu": utilisation(flops, job.tokens / found["bare_tok_s"], device),
    }


def _parameters(model: Path) -> int:
    """Weights in the directory's one file; a tied output layer is not there a second time."""
    with safe_open(model / "model.safetensors", "pt") as file:
        weights = file.keys()
        return sum(prod(file.get_slice(name).get_shape()) for name in weights)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def _config(options: argparse.Namespace, model: Path) -> TrainConfig:
    """bfloat16 weights have their float32 masters in ZeRO's optimizer."""
    return TrainConfig.model_validate(
        {
            "model": {"path": model},
            "prompts": {"train": "unused.jsonl"},
            "reward": {"name": "bench"},
            "sampling": {"n": _SAMPLES, "max_tokens": options.max_tokens},
            "batch_groups": options.groups,
            "workers": {
                "device": options.device,
                "dtype": options.dtype,
                "zero_stage": 0 if options.dtype == "float32" else 1,
                "threads": len(os.sched_getaffinity(0)),
                "max_tokens_per_micro_batch": options.micro_batch_tokens,
                "gradient_checkpointing": options.gradient_checkpointing,
                "packing": "off",
            },
        }
    )


def _write(figures: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    _draw(figures, path.with_suffix(".png"))
    print(json.dumps(figures, indent=2))


def _draw(figures: Mapping[str, Any], path: Path) -> None:
    """Tokens/s of every step, and the ratio of every round beside bar and goal."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    rounds = range(1, len(figures["ratio_of_rounds"]) + 1)
    for name, side in (("bare DeepSpeed loop", "bare"), ("trainer", "trainer")):
        speeds = [figures["tokens_per_step"] / each[side]["wall_s"] for each in figures["rounds"]]
        left.plot(rounds, speeds, "o-", label=name)
    left.set(xlabel="round", ylabel="tokens/s", title="The same batch by turns")
    left.set_ylim(0, 1.1 * left.dataLim.y1)  # not (0, None): that keeps no room above what was drawn
    left.legend(loc="lower right", frameon=False)
    right.plot(rounds, figures["ratio_of_rounds"], "o", color="C0")
    right.axhline(figures["ratio"], color="C0", linewidth=1, label=f"median {figures['ratio']:.3f}")
    right.axhline(BAR, color="C3", linewidth=1, label=f"bar {BAR:.2f}")
    right.axhline(GOAL, color="0.5", linewidth=1, linestyle="--", label=f"goal {GOAL:.2f}")
    right.set(xlabel="round", ylabel="trainer / bare loop, tokens/s", title="Ratio of each round")
    right.legend(loc="best", frameon=False)
    for axes in (left, right):
        axes.set_xticks(list(rounds))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(PACKING_TOLERANCE), default="float32")
    parser.add_argument("--size", choices=list(SIZES), default="50m")
    parser.add_argument("--groups", type=int, default=5, help=f"of {_SAMPLES} samples, per step")
    parser.add_argument("--max-tokens", type=int, default=256, help="responses have half of it to all of it")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--check-packing", action="store_true", help="also packed against padded loss")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
