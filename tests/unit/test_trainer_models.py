"""A model is loaded without what makes it compute at random in train mode."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlavaConfig

from tests.tiny_models import build_tokenizer
from trainer.models import load_policy, silence


@pytest.fixture
def noisy_dir(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_loaded_model_computes_the_same_in_train_mode(noisy_dir: Path) -> None:
    model = load_policy(noisy_dir, "float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits
        model.train()
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)


def test_settings_of_nested_models_are_silenced_and_others_kept() -> None:
    config = LlavaConfig(text_config=LlamaConfig(attention_dropout=0.3, hidden_size=64, rms_norm_eps=0.5))
    config.router_jitter_noise, config.classifier_dropout = 0.2, None
    silence(config)
    assert (config.text_config.attention_dropout, config.router_jitter_noise) == (0.0, 0.0)
    assert (config.text_config.rms_norm_eps, config.classifier_dropout) == (0.5, None)
