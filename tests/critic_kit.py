"""Cores of a policy and a critic in this process, and rows to train them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from trainer.algorithm import AlgorithmConfig
from trainer.config import CriticConfig, OptimizerConfig, WorkersConfig
from trainer.critic import CriticCore, CriticSpec
from trainer.policy import PolicyCore, PolicySpec
from trainer.rows import Row

STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]


def a_critic(model_dir: Path, stage: int = 0, dtype: str = "float32", **config: Any) -> CriticCore:
    workers = WorkersConfig.model_validate({"zero_stage": stage, "dtype": dtype})
    return CriticCore(CriticSpec(model_dir, workers, CriticConfig.model_validate(config)))


def a_policy(model_dir: Path, stage: int = 0, **algorithm: Any) -> PolicyCore:
    workers = WorkersConfig.model_validate({"zero_stage": stage})
    return PolicyCore(
        PolicySpec(model_dir, workers, OptimizerConfig(lr=1e-3), AlgorithmConfig.model_validate(algorithm), 0)
    )


def valued_rows(count: int = 12, *, seed: int = 3) -> list[Row]:
    """Of 1 to 8 response tokens, one in four not trained, whose returns follow from their first token."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 9))
        ids = rng.integers(5, 200, prompt + response).astype(np.int32)
        mask = (rng.random(response) > 0.25).astype(np.float32)
        mask[-1] = 1
        rows.append(
            Row(
                ids[:prompt], ids[prompt:], np.full(response, -5.5, np.float32), mask, mask, float(rng.normal()), 1.0,
                values_T=np.zeros(response, np.float32),
                returns_T=np.full(response, ids[0] / 100 - 1, np.float32) * mask,
            )
        )  # fmt: skip
    return rows


class Rank:
    """A core as a group of one; what is asked of it is kept in `calls`."""

    world_size = 1

    def __init__(self, core: Any) -> None:
        self.core = core
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        named = {"undo": args[0]} if method == "release" else {}
        return [getattr(self.core, method)(**named)]

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        self.calls.append(method)
        named = dict(zip(("lr", "hold"), args, strict=False))
        return [getattr(self.core, method)(shares[0], **named)]


def saved(core: PolicyCore | CriticCore, directory: Path) -> dict[str, torch.Tensor]:
    """Optimizer state and weights."""
    directory.mkdir(exist_ok=True)
    core.save_state(directory)
    core.export(directory, bucket_bytes=1 << 28)
    files = [file for file in directory.glob("*.safetensors") if not file.name.startswith("rng")]
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def equal(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Of all that there was before; state that an optimizer made since is not looked at."""
    assert len(before) > 10
    return all(torch.equal(before[name], after[name]) for name in before)
