"""The losses and the last logprobs of a small policy on a device of one's choice.

    python -m tests.gpu.curve MODEL_DIR cpu

A process of its own for each device, because DeepSpeed keeps the first that it meets. Needs torch, transformers,
DeepSpeed, pydantic and structlog alone.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed import HashStore

from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch, Row, make_batch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.engine import join_group
from trainer.partition import Packing
from trainer.policy import PolicyCore, PolicySpec

STEPS = 10
CANARY = [(5, 6, 7, 8, 9, 10)]


def rows(step: int = 0, count: int = 16) -> list[Row]:
    """Of 2 to 8 prompt and 1 to 40 response tokens."""
    rng = np.random.default_rng(step)
    made = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 41))
        ids, ones = rng.integers(5, 200, prompt + response).astype(np.int32), np.ones(response, np.float32)
        behavior = np.full(response, -5.5, np.float32)
        made.append(Row(ids[:prompt], ids[prompt:], behavior, ones, ones, float(rng.normal(0.5)), 0.8))
    return made


def batches(some: Sequence[Row], packing: Packing = "off", *, budget: int = 256) -> list[MicroBatch]:
    return make_batch(some, world_size=1, max_tokens=budget, aggregation="token_mean", packing=packing)[0]


def policy(model_dir: Path, device: str, **workers: Any) -> PolicyCore:
    settings = WorkersConfig.model_validate({"device": device, "packing": "off", **workers})
    return PolicyCore(PolicySpec(model_dir, settings, OptimizerConfig(lr=1e-3), AlgorithmConfig(), 0))


def losses(core: PolicyCore, packing: Packing = "off") -> list[float]:
    """A number a step, of which every one is of another batch."""
    return [core.update(batches(rows(step), packing), lr=1e-3).sums["loss"] for step in range(STEPS)]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = sys.argv[2]
    join_group(0, 1, HashStore(), device=sys.argv[2])
    trained = policy(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"losses": losses(trained), "canary": trained.canary_logprobs(CANARY)[0]}))
