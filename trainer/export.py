"""A model's weights, configuration and companions as a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from rollout.durable import write_text
from rollout.weights import Bucket, TensorSpec
from trainer.artefact import write_weights
from trainer.lora import merged_tensors
from trainer.zero import whole_tensors


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a manifest says of exported weights; empty on ranks other than 0."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]


def export_model(
    model: Any, tensors: Mapping[str, torch.Tensor], companions: Mapping[str, bytes], directory: Path, *,
    bucket_bytes: int,
) -> ExportResult:  # fmt: skip
    """Write companions (`models.read_companions`), config and `model_tensors` into an existing directory, synced."""
    for name, content in companions.items():
        (directory / name).write_bytes(content)
    write_text(directory / "config.json", model.config.to_json_string(use_diff=True))
    return ExportResult(*write_weights(directory, tensors, bucket_bytes=bucket_bytes))


def model_tensors(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every distinct weight once (a tied output layer is its embedding), copied to the CPU, an adapter added, under the
    names and in the shapes of Hugging Face files.

    Every rank has to call it, since its part may be asked for; those with `keep` off get nothing.
    """
    parameters = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    tensors = merged_tensors(model, whole_tensors({**parameters, **buffers}, keep=keep))
    return _as_in_files(model, tensors) if keep else tensors


def _as_in_files(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers renames what it loads and makes one tensor of a layer's experts, which engines do not know."""
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in saved.items()}
