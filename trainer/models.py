"""Policies from a local Hugging Face directory."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from rollout.errors import ConfigError
from trainer.errors import ModelError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
_NOT_COPIED = frozenset({"config.json", "manifest.json", "model.safetensors.index.json"})
_NOISE = re.compile("dropout|pdrop|layerdrop|drop_path|jitter")
"""Settings that make a model in train mode compute at random."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_directory(path: Path) -> None:
    """Raises ModelError when something that training needs is missing; reads no weights."""
    remedy = "it must be a Hugging Face directory with config.json, *.safetensors and a tokenizer"
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory: {remedy}")
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}/config.json cannot be read ({error}): {remedy}") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ModelError(f"{path}/config.json names no model_type: {remedy}")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} holds no *.safetensors weights: {remedy}")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ModelError(f"{path} holds no tokenizer: {remedy}")


def load_policy(path: Path, dtype: str) -> Any:
    """The causal language model with weights in `dtype` on the CPU, in eval mode (no dropout, also in training).

    Raises ModelError when the directory is broken, a weight is missing, or a weight is not finite.
    """
    return load_silenced(AutoModelForCausalLM, path, dtype)


def load_silenced(
    auto: Any, path: Path, dtype: str, *, changes: Mapping[str, Any] = MappingProxyType({}), new: str | None = None
) -> Any:
    """A model of one of transformers' `auto` classes, as `load_policy` returns it, its configuration with `changes`.

    Weights under the name `new` may be missing and are 0 then. Raises ModelError as `load_policy` does.
    """
    check_directory(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        silence(config)
        for name, value in changes.items():
            setattr(config, name, value)
        model, report = auto.from_pretrained(
            path,
            config=config,
            attn_implementation=_attention(config),
            dtype=DTYPES[dtype],
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers and safetensors raise many types for broken files
        raise ModelError(f"{path} does not load: {type(error).__name__}: {error}") from error
    created = {key for key in report["missing_keys"] if new is not None and key.startswith(f"{new}.")}
    if missing := sorted(report["missing_keys"] - created):
        raise ModelError(f"{path} lacks {len(missing)} weights, first {missing[0]}")
    for name, tensor in model.named_parameters():
        if name in created:
            torch.nn.init.zeros_(tensor)
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{path}: {name} holds values that are not finite")
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.eval()


def _attention(config: PretrainedConfig) -> str | None:
    """Eager where attention scores are capped, as in Gemma 2: transformers' `sdpa`, its usual choice, ignores the cap,
    and engines apply it. None leaves the choice to transformers."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def silence(config: PretrainedConfig) -> None:
    """Set every dropout and the like to 0, in place: engines sample without it, and train mode would turn it on."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            silence(value)
        elif _NOISE.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, 0.0)


def load_tokenizer(path: Path) -> Any:
    """Raises ModelError."""
    check_directory(path)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(f"{path}: the tokenizer does not load: {type(error).__name__}: {error}") from error


def check_same_tokens(policy: Path, other: Path, *, knob: str) -> None:
    """Raises ConfigError unless every token has the same id in both directories, ModelError without a tokenizer."""
    if policy.resolve() == other.resolve():
        return
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (policy, other))
    if differing := len(ours.items() ^ theirs.items()):
        raise ConfigError(
            f"{knob}={other} reads the token ids of model.path={policy}, but {differing} entries of their vocabularies"
            " differ: it needs the policy's tokenizer"
        )


def context_length(path: Path) -> int | None:
    """`max_position_embeddings` (`n_positions` in GPT-2's family) of the config; None where it has neither."""
    config = json.loads((path / "config.json").read_text())
    value = config.get("max_position_embeddings") or config.get("n_positions")
    return int(value) if value else None


def vocabulary_size(path: Path) -> int | None:
    """Rows of the embedding by the config; None where it does not say."""
    config = json.loads((path / "config.json").read_text())
    value = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(value) if value else None


class Tokenise:
    """Prompts to token ids: text as it is, chat messages through the tokenizer's template, ids unchanged."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, source: str | list[Mapping[str, Any]] | list[int]) -> tuple[Sequence[int], str]:
        if isinstance(source, str):
            return list(self._tokenizer(source).input_ids), source
        if source and isinstance(source[0], int):
            size = len(self._tokenizer)
            if bad := [i for i in source if isinstance(i, int) and not 0 <= i < size]:
                raise ValueError(f"token id {bad[0]} is not below the vocabulary size {size}")
            return [int(i) for i in source if isinstance(i, int)], str(self._tokenizer.decode(source))
        text = str(self._tokenizer.apply_chat_template(source, tokenize=False, add_generation_prompt=True))
        return list(self._tokenizer(text, add_special_tokens=False).input_ids), text


def read_companions(directory: Path) -> dict[str, bytes]:
    """What belongs to a model besides config and weights, by file name: tokenizer, chat template, generation config.

    Kept in memory because the directory may be a checkpoint, which is retired while the run goes on.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in _NOT_COPIED
    }
