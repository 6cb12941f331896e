"""Random Qwen3 policies by size, for benches in which a model has to be work and need not be right."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192
SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "50m": {
            "hidden_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "head_dim": 64,
            "intermediate_size": 2304,
        },
        "1.5b": {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
        },
    }
)
"""Shapes of about so many parameters."""


def random_policy(directory: Path, size: str, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Build it once, float32 with tied embeddings; returns the Hugging Face directory."""
    shape: dict[str, Any] = dict(SIZES[size])
    if (directory / "model.safetensors").exists() and _shape(directory) == shape:
        return directory
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **shape,
    )
    partial = directory.with_suffix(".part")
    for found in (partial, directory):
        shutil.rmtree(found, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save_pretrained(partial)
    Qwen3ForCausalLM(config).save_pretrained(partial, max_shard_size="50GB")
    partial.rename(directory)
    return directory


def _shape(directory: Path) -> dict[str, Any]:
    """Of the model that is there."""
    found = json.loads((directory / "config.json").read_text())
    return {name: found.get(name) for name in next(iter(SIZES.values()))}


def filler_tokenizer() -> PreTrainedTokenizerFast:
    """VOCABULARY words without meaning, where a bench hands in token ids itself."""
    words = {"<pad>": 0, "<eos>": 1} | {f"<f{i}>": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
