"""What the trainer writes of a model has the names and shapes of its files, and it computes what they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from services.rehearsal import independent_logprobs
from tests.tiny_models import build_tokenizer
from trainer.export import model_tensors
from trainer.models import load_policy
from trainer.packed_attention import enable_packing

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
KINDS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=0.05, query_pre_attn_scalar=1),
}


def saved(kind: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS[kind])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_of_a_model_are_those_of_its_files(kind: str, tmp_path: Path) -> None:
    directory = saved(kind, tmp_path)
    files = load_file(directory / "model.safetensors")
    tensors = model_tensors(load_policy(directory, "float32"), keep=True)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in files.items()
    }
    assert all(torch.equal(tensors[name], tensor) for name, tensor in files.items())
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_scores_are_capped_where_the_model_caps_them(tmp_path: Path) -> None:
    directory, ids = saved("gemma2", tmp_path), ((5, 6, 7, 8, 9, 10, 11, 12),)
    found = []
    for cap in (0.05, None):
        config = KINDS["gemma2"].to_dict() | {"attn_logit_softcapping": cap}
        Gemma2Config(**config).save_pretrained(directory)
        model = load_policy(directory, "float32")
        logprobs = model(torch.tensor(ids)).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(ids)[0, 1:, None])[:, 0].detach()
        assert own.tolist() == pytest.approx(independent_logprobs(directory, ids)[0], abs=1e-4)
        assert not enable_packing(model, "auto", torch.device("cpu"))
        found.append(own)
    assert float((found[0] - found[1]).abs().max()) > 0.01
