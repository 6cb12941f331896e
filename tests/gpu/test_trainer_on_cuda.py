"""The trainer on a GPU computes what it computes on a CPU. Needs a CUDA device: `make gpu-check`.

Imports no vLLM, Ray or Redis, and no fixture of the other tests (`--noconftest`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.critic_kit import valued_rows
from tests.gpu.curve import CANARY, batches, losses, policy, rows
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy
from trainer.algorithm import AlgorithmConfig
from trainer.batch import by_row
from trainer.config import CriticConfig, OptimizerConfig, WorkersConfig
from trainer.critic import CriticCore, CriticSpec
from trainer.engine import join_group
from trainer.lora_config import LoraConfig
from trainer.models import load_policy
from trainer.objective import forward_loss
from trainer.packed_attention import enable_packing
from trainer.partition import Packing
from trainer.policy import PolicyCore, PolicySpec
from trainer.reference import ReferenceCore

DEVICE = os.environ.get("NIGHTSHIFT_GPU_CHECK_DEVICE", "cuda")
"""The tests themselves are tried with `cpu`."""
ROUNDING = 2e-3
"""Of a loss or a logprob in float32 after ten steps: sums are in another order on each device."""
HALF = 0.1
"""The same in bfloat16, which keeps eight bits."""
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("rank"),
]


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    os.environ["DS_ACCELERATOR"] = DEVICE
    join_group(0, 1, dist.HashStore(), device=DEVICE)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[Architecture, Path]:
    return {name: build_policy(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def model_dir(directories: dict[Architecture, Path]) -> Path:
    return directories["qwen3_tied"]


@pytest.fixture(scope="module")
def on_cpu(model_dir: Path) -> dict[str, Any]:
    """In a process of its own, as the CPU has it."""
    command = [sys.executable, "-m", "tests.gpu.curve", str(model_dir), "cpu"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_ten_updates_have_the_losses_and_the_weights_of_a_cpu(
    model_dir: Path, on_cpu: dict[str, Any], stage: int, dtype: str
) -> None:
    core, near = policy(model_dir, DEVICE, zero_stage=stage, dtype=dtype), ROUNDING if dtype == "float32" else HALF
    assert losses(core) == pytest.approx(on_cpu["losses"], abs=near)
    assert core.canary_logprobs(CANARY)[0] == pytest.approx(on_cpu["canary"], abs=near)


@pytest.mark.parametrize(
    "workers",
    [
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True},
        {"gradient_checkpointing": True},
        {"packing": "on"},
        {"packing": "on", "zero_stage": 3, "gradient_checkpointing": True},
    ],
    ids="-".join,
)
def test_what_saves_memory_or_padding_changes_no_loss(
    model_dir: Path, on_cpu: dict[str, Any], workers: dict[str, Any]
) -> None:
    core = policy(model_dir, DEVICE, **workers)
    assert losses(core, workers.get("packing", "off")) == pytest.approx(on_cpu["losses"], abs=ROUNDING)


def gradients(model: Any, packing: Packing) -> dict[str, torch.Tensor]:
    """In float32."""
    for batch in batches(rows(), packing):
        loss, _ = forward_loss(model, batch, AlgorithmConfig(), torch.device(DEVICE))
        loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Relative to the length of the others."""
    gap = sum(float((some[name] - others[name]).square().sum()) for name in others)
    return float((gap / sum(float(each.square().sum()) for each in others.values())) ** 0.5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_in_half_precision_are_as_near_to_float32_as_padded_ones(
    directories: dict[Architecture, Path], architecture: Architecture
) -> None:
    def model(dtype: str, packing: Packing) -> Any:
        loaded = load_policy(directories[architecture], dtype).to(DEVICE)
        assert enable_packing(loaded, packing, torch.device(DEVICE)) is (packing == "on")
        return loaded

    exact = gradients(model("float32", "off"), "off")
    assert distance(gradients(model("float32", "on"), "on"), exact) < 1e-4
    padded = distance(gradients(model("bfloat16", "off"), "off"), exact)
    packed = distance(gradients(model("bfloat16", "on"), "on"), exact)
    assert 0 < padded < 0.1
    assert packed < 1.5 * padded


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_run_goes_on_from_its_state_and_its_weights_are_what_others_load(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    core = policy(model_dir, DEVICE, zero_stage=stage, dtype=dtype)
    losses(core)
    core.save_state(tmp_path)
    core.export(tmp_path, bucket_bytes=1 << 20)
    resumed = policy(tmp_path, DEVICE, zero_stage=stage, dtype=dtype)
    resumed.load_state(tmp_path)
    near = ROUNDING if dtype == "float32" else HALF
    assert losses(resumed) == pytest.approx(losses(core), abs=near)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor(CANARY)
    with torch.no_grad():
        values = loaded(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    fresh = policy(tmp_path, DEVICE, zero_stage=stage, dtype=dtype)
    assert fresh.canary_logprobs(CANARY)[0] == pytest.approx(values.tolist(), abs=near)


def test_a_held_update_is_undone_to_the_bit(model_dir: Path) -> None:
    core = policy(model_dir, DEVICE)
    losses(core)
    before = core.canary_logprobs(CANARY)
    assert core.update(batches(rows(99)), lr=1e-2, hold=True).applied
    assert core.canary_logprobs(CANARY) != before
    core.release(undo=True)
    assert core.canary_logprobs(CANARY) == before


def test_a_loss_that_is_not_finite_changes_nothing(model_dir: Path) -> None:
    core = policy(model_dir, DEVICE)
    losses(core)
    before = core.canary_logprobs(CANARY)
    broken = [replace(row, advantage=float("inf")) for row in rows(99)]
    assert not core.update(batches(broken), lr=1e-3).applied
    assert core.canary_logprobs(CANARY) == before


def test_an_adapter_trains_alone_beside_the_weights_it_is_trained_on(model_dir: Path) -> None:
    workers = WorkersConfig.model_validate({"device": DEVICE, "packing": "off"})
    core = PolicyCore(
        PolicySpec(model_dir, workers, OptimizerConfig(lr=1e-2), AlgorithmConfig(), 0, LoraConfig(r=4, alpha=8))
    )
    share = batches(rows())
    alone = ReferenceCore(model_dir, workers).logprobs(share)
    for _ in range(5):
        assert core.update(share, lr=1e-2).applied
    pairs = zip(core.reference_logprobs(share), alone, strict=True)
    assert all(np.allclose(found, wanted, atol=1e-5) for found, wanted in pairs)
    assert core.canary_logprobs(CANARY) != policy(model_dir, DEVICE).canary_logprobs(CANARY)


def test_a_critic_learns_its_returns(model_dir: Path) -> None:
    workers = WorkersConfig.model_validate({"device": DEVICE, "packing": "off"})
    critic = CriticCore(CriticSpec(model_dir, workers, CriticConfig.model_validate({"value_clip": None})))
    some = valued_rows()
    assert not any(values.any() for values in by_row(some, [batches(some)], [critic.values(batches(some))]))
    found = [critic.update(batches(some), lr=3e-3).sums["loss"] for _ in range(25)]
    assert found[-1] < found[0] / 10
