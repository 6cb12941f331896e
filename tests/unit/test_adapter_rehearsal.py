"""The adapter of the rehearsal is one that others read, and moves the model as the merged copy says."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout.weights import Canary
from services.adapter_rehearsal import write_adapter
from services.config import SharingConfig
from services.rehearsal import MIN_MOVE, RehearsalFailed, canary_ids, distance, independent_logprobs
from tests.fake_trainer import peft_logprobs
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy

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
