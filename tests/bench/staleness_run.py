"""One run of the staleness study: the demo's policy, task and settings, the trainer's step, samples of an exact age.

    weights after step s - 1 - k --actor--> groups --trainer.step.update--> weights after step s

Its result follows from the setting alone: no engine, no queue, no clock. The groups of the first steps, for which no
weights are old enough, are sampled by the policy that the run starts from. Nothing is dropped for its age.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from actor import Actor, mean_reward
from safetensors.torch import load_file
from staleness_grid import Setting
from weight_history import WeightHistory, Weights

from deploy.demo.models import Models
from deploy.demo.settings import demo_config
from rollout.prompts import Prompt, read_prompts, take
from trainer import in_process
from trainer.config import TrainConfig
from trainer.models import Tokenise, load_tokenizer
from trainer.step import Update, update
from trainer.workers import Workers, packing_settled, start_workers

LAST_STEPS = 5
"""Over which the training reward is the mean."""
EVALUATION_SAMPLES = 4
"""Of each held-out prompt."""
_EVALUATION_SEED = 1_000_003
_KEPT = ("ess", "importance_p95", "behavior_kl", "clip_fraction", "cap_fraction", "entropy", "grad_norm", "engine_gap")
"""Metrics of a step whose means a record has."""


def train(setting: Setting, model: Path, prompts: tuple[Path, Path]) -> dict[str, Any]:
    """The record of one run from the policy in `model`; `prompts` are the train and held-out splits as JSONL."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ns-bench-") as directory:
        config = study_config(setting, model, prompts, Path(directory))
        found = asyncio.run(_train(setting, config, *_read(prompts, config)))
    return {"setting": asdict(setting), **found, "seconds": round(time.monotonic() - started, 1)}


def study_config(setting: Setting, model: Path, prompts: tuple[Path, Path], directory: Path) -> TrainConfig:
    """The demo's settings with those of the run. Raises ConfigError."""
    flags = {
        "train.algorithm.correction": setting.correction,
        "train.optimizer.lr": setting.lr,
        "train.batch_groups": setting.groups,
        "train.seed": setting.seed,
        "train.prompts.shuffle_seed": setting.seed,
    }
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    config, _ = demo_config(directory, models=Models(model), prompts=prompts, steps=setting.steps, flags=given)
    return config.train_config()


async def _train(
    setting: Setting, config: TrainConfig, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> dict[str, Any]:
    actor = Actor(config)
    generator = torch.Generator().manual_seed(setting.seed)
    history = WeightHistory(setting.staleness)
    rewards: list[float] = []
    updates: list[Update] = []
    async with AsyncExitStack() as stack:
        workers = await start_workers(stack, config, None, in_process)
        config = await packing_settled(config, workers)
        history.append(0, await _weights(workers, config))
        for step in range(1, setting.steps + 1):
            actor.load(*history.stale)
            picked = _batch(prompts, config, step)
            groups = actor.groups(picked, n=config.sampling.n, generator=generator)
            updates.append(
                await update(
                    groups, step=step, seed=config.seed, same_weights={step - 1}, config=config, workers=workers
                )
            )
            rewards.append(mean_reward(groups))
            history.append(step, await _weights(workers, config))
    actor.load(*history.newest)
    evaluation = torch.Generator().manual_seed(_EVALUATION_SEED)
    groups = actor.groups(held_out, n=EVALUATION_SAMPLES, generator=evaluation)
    return {"final_reward": mean_reward(groups), "samples": len(held_out) * EVALUATION_SAMPLES, **_of(rewards, updates)}


def _of(rewards: Sequence[float], updates: Sequence[Update]) -> dict[str, Any]:
    last = rewards[-LAST_STEPS:]
    return {
        "training_reward": sum(last) / len(last),
        "skipped": sum(not one.applied for one in updates),
        "metrics": mean_metrics([one.metrics for one in updates]),
        "rewards": rewards,
    }


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the kept ones, over the steps that have them."""
    columns = {name: [one[name] for one in metrics if name in one] for name in _KEPT}
    return {name: sum(column) / len(column) for name, column in columns.items() if column}


def _read(paths: tuple[Path, Path], config: TrainConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Of the train and the held-out split."""
    tokenise = Tokenise(load_tokenizer(config.model.path))
    limit = config.prompts.max_prompt_tokens
    train_prompts, held_out = (read_prompts(path, tokenise, max_prompt_tokens=limit) for path in paths)
    return train_prompts, held_out


def _batch(prompts: Sequence[Prompt], config: TrainConfig, step: int) -> list[Prompt]:
    """Those of a step, in the order in which the trainer's feeder takes them."""
    cursor = (step - 1) * config.batch_groups
    indices = take(len(prompts), seed=config.prompts.shuffle_seed, cursor=cursor, amount=config.batch_groups)
    return [prompts[index] for index in indices]


async def _weights(workers: Workers, config: TrainConfig) -> Weights:
    """The policy's, as a push would publish them."""
    directory = config.run_dir / "weights"
    directory.mkdir(parents=True)
    try:
        await workers.policy.call_rank(0, "export", str(directory), config.push.bucket_bytes, ())
        return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    finally:
        shutil.rmtree(directory)
