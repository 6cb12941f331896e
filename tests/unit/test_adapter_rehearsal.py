"""The adapter of the rehearsal is one that others read, and moves the model as the merged copy says."""

import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout.weights import Canary
from services.adapter_rehearsal import rehearse_adapter, write_adapter
from services.config import SharingConfig
from services.rehearsal import MIN_MOVE, RehearsalFailed, canary_ids, distance, independent_logprobs
from services.rollout_adapters import RolloutAdapters
from services.staging import Staging
from tests.fake_trainer import peft_logprobs
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy
from tests.unit.test_rollout_adapters import Engine, turns

LAYERS = frozenset({*SharingConfig().target_modules, "lm_head", "embed_tokens"})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_merged_copy_computes_what_peft_does_with_the_adapter(architecture: Architecture, tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy", architecture)
    write_adapter(model, tmp_path / "adapter", tmp_path / "merged", LAYERS)
    ids = canary_ids(300)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")
    merged = Canary(ids, independent_logprobs(tmp_path / "merged", ids))
    assert distance(merged, Canary(ids, peft_logprobs(adapted, ids))) < 1e-4
    assert distance(merged, Canary(ids, independent_logprobs(model, ids))) > 2 * MIN_MOVE


@pytest.mark.parametrize("layer", SharingConfig().target_modules)
def test_an_engine_that_leaves_the_adapter_out_of_one_kind_of_layer_is_noticed(layer: str, tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy", "qwen3_tied")
    write_adapter(model, tmp_path / "all", tmp_path / "whole", LAYERS)
    write_adapter(model, tmp_path / "some", tmp_path / "without", LAYERS - {layer})
    ids = canary_ids(300)
    whole, without = (Canary(ids, independent_logprobs(tmp_path / name, ids)) for name in ("whole", "without"))
    assert distance(whole, without) > 0.05


def test_the_adapter_alone_is_the_same(tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy")
    write_adapter(model, tmp_path / "beside", tmp_path / "merged", LAYERS)
    write_adapter(model, tmp_path / "alone", None, LAYERS)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()


def test_a_model_without_the_layers_is_refused(tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy")
    with pytest.raises(RehearsalFailed, match=r"none of the layers .*\['query_key_value'\]"):
        write_adapter(model, tmp_path / "adapter", None, frozenset({"query_key_value"}))


def test_noise_is_seeded(tmp_path: Path) -> None:
    model = build_policy(tmp_path / "policy")
    torch.manual_seed(1)
    write_adapter(model, tmp_path / "a", None, LAYERS)
    torch.manual_seed(2)
    write_adapter(model, tmp_path / "b", None, LAYERS)
    first, second = (tmp_path / name / "adapter_model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


async def rehearsed(engine: Engine, tmp: Path) -> float:
    """As for a model that is too large to be computed twice."""
    model = build_policy(tmp / "policy")
    staging = Staging(tmp / "staging", "host-1-a")
    staging.prepare()
    adapters = RolloutAdapters(engine, places=2, first=2, max_rank=8, watchdog_s=5)
    await adapters.start()
    try:
        return await rehearse_adapter(
            adapters, model=model, staging=staging, dtype="float32", tolerance=0.05, independent_limit=0
        )
    finally:
        await turns()
        staging.close()


async def test_of_a_large_model_the_adapter_has_to_move_the_canary_and_leaves(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(RehearsalFailed, match="moves the canary by 0 nats only"):
        await rehearsed(engine, tmp_path / "still")
    engine.moved = 0.5
    assert await rehearsed(engine, tmp_path / "moved") == 0
    assert engine.loaded == {}


async def test_what_cannot_be_measured_is_no_proof(tmp_path: Path) -> None:
    engine = Engine()
    engine.fault = RuntimeError("no kernel for rank 1")
    with pytest.raises(RehearsalFailed, match=r"cannot compute with an adapter .*no kernel for rank 1"):
        await rehearsed(engine, tmp_path / "fault")
    engine.fault, engine.moved = None, math.nan
    with pytest.raises(RehearsalFailed, match=r"cannot compute with an adapter .*not finite"):
        await rehearsed(engine, tmp_path / "nan")
    assert engine.loaded == {}
