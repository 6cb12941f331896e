"""Tiny policies of three architectures on local disk, each with a byte-level BPE tokenizer and a chat template.

    build_policy(directory, "qwen3_tied")   # or "llama_untied", "qwen2_biases"

They are random, seeded, a fraction of a million parameters, and load with `AutoModelForCausalLM.from_pretrained`.
"""

from pathlib import Path
from typing import Literal, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Architecture = Literal["qwen3_tied", "llama_untied", "qwen2_biases", "qwen2_tied"]
ARCHITECTURES: tuple[Architecture, ...] = ("qwen3_tied", "llama_untied", "qwen2_biases")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LINES = (
    "the quick brown fox jumps over the lazy dog",
    "spell this word backward: stressed is desserts",
    "one two three four five six seven eight nine ten",
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 320 tokens with <pad>, <eos> and the chat template's role marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_LINES * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def build_config(
    architecture: Architecture, *, vocab_size: int, eos_token_id: int, pad_token_id: int, context: int = 512
) -> PretrainedConfig:
    """Two layers, hidden size 64, grouped-query attention of head size 32 (the smallest the CPU engine takes), for
    sequences of `context` tokens."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
    }
    match architecture:
        case "qwen3_tied":
            return Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True)
        case "llama_untied":
            return LlamaConfig(**shape, tie_word_embeddings=False)
        case "qwen2_biases":
            return Qwen2Config(**shape, tie_word_embeddings=False)
        case "qwen2_tied":
            return Qwen2Config(**shape, tie_word_embeddings=True)


def build_model(
    architecture: Architecture, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, context: int = 512
) -> PreTrainedModel:
    """A float32 model whose logits spread over about a nat and whose biases are not zero."""
    torch.manual_seed(seed)
    config = build_config(
        architecture,
        vocab_size=len(tokenizer),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        context=context,
    )
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.12)
    return model


def build_policy(
    directory: Path, architecture: Architecture = "qwen3_tied", *, seed: int = 0, context: int = 512
) -> Path:
    """Write model and tokenizer as a Hugging Face directory; returns it."""
    tokenizer = build_tokenizer()
    model = build_model(architecture, tokenizer, seed=seed, context=context)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_endless_policy(directory: Path, architecture: Architecture = "qwen3_tied") -> Path:
    """A policy whose every sample runs to its `max_tokens`: its end is a token that the model cannot sample."""
    tokenizer = build_tokenizer()
    model = build_model(architecture, tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_classifier(directory: Path, architecture: Architecture = "qwen3_tied") -> Path:
    """A sequence classifier of one label with the policy's tokenizer and a head that is not 0."""
    build_policy(directory, architecture)
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    torch.nn.init.normal_(model.score.weight, 0, 0.5, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(directory)
    return directory
