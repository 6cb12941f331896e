"""A random ~50 M-parameter Qwen3: large enough that the engine, and not Python around it, is the work."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.policy import build_tokenizer

VOCABULARY = 8192
"""Mostly filler tokens, so that a random policy rarely samples the end token and answers run to their limit."""


def build_large_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's character tokenizer, filled up to VOCABULARY tokens."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<f{i}>" for i in range(VOCABULARY - len(tokenizer))])
    return tokenizer


def large_policy(directory: Path) -> Path:
    """Build it once; returns the Hugging Face directory."""
    if (directory / "model.safetensors").exists():
        return directory
    torch.manual_seed(0)
    tokenizer = build_large_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=14,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
