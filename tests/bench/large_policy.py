"""A random ~50 M-parameter Qwen3 for the demo's prompts: the engine, and not Python around it, is the work."""

from pathlib import Path

from random_policy import VOCABULARY, random_policy
from transformers import PreTrainedTokenizerFast

from deploy.demo.policy import build_tokenizer


def build_large_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's character tokenizer, filled up, so that a random policy rarely samples the end token."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<f{i}>" for i in range(VOCABULARY - len(tokenizer))])
    return tokenizer


def large_policy(directory: Path) -> Path:
    """Build it once; returns the Hugging Face directory."""
    return random_policy(directory, "50m", build_large_tokenizer())
