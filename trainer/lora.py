"""Adapters on a policy: adding, switching off, merging, and the PEFT directory of one.

adapter_model.safetensors  adapter_config.json     as `PeftModel.from_pretrained` reads them
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.durable import sync_file, write_text
from rollout.errors import ConfigError
from rollout.weights import AdapterForm, Bucket, TensorSpec, file_sha256
from trainer.errors import CheckpointError
from trainer.lora_config import LoraConfig
from trainer.zero import whole_tensors

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE_FILE = "base_weights.json"
_NAME = "default"
_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"


def add_adapter(model: Any, lora: LoraConfig, base: Path) -> None:
    """Freeze the model and put an adapter that changes nothing yet into its linear layers, in place.

    Its random half comes from torch's generator. `base` is the directory the model was loaded from. Raises ConfigError
    where a target is not in the model.
    """
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model

    present = _linear_layers(model)
    targets = sorted(set(lora.target_modules) or present)
    if absent := sorted(set(targets) - present):
        raise ConfigError(
            f"lora.target_modules names {', '.join(absent)}, but the linear layers of {base} are"
            f" {', '.join(sorted(present))}"
        )
    config = PeftLora(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        base_model_name_or_path=str(base),
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _linear_layers(model: Any) -> set[str]:
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not output
    }


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's parameters under the names that PEFT gives them in a file."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


def whole_adapter(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """The same, copied to the CPU. Every rank has to call it; those with `keep` off get nothing."""
    return whole_tensors(adapter_tensors(model), keep=keep)


def load_adapter(model: Any, directory: Path) -> None:
    """Read what `write_adapter` wrote into the adapter that the model has.

    Raises CheckpointError where rank, scale or layers differ.
    """
    saved, wanted = json.loads((directory / ADAPTER_CONFIG).read_text()), model.peft_config[_NAME]
    for key, knob in (("r", "r"), ("lora_alpha", "alpha")):
        if saved[key] != getattr(wanted, key):
            raise CheckpointError(
                f"{directory} holds an adapter with {knob}={saved[key]}, but train.lora.{knob}={getattr(wanted, key)}"
            )
    own, values = adapter_tensors(model), load_file(directory / ADAPTER_FILE)
    if differing := sorted(set(own) ^ set(values)):
        raise CheckpointError(
            f"{directory} holds an adapter of {', '.join(saved['target_modules'])}, but train.lora.target_modules and"
            f" model.path give another: {len(differing)} tensors differ, first {differing[0]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])


def write_adapter(
    model: Any, tensors: Mapping[str, Tensor], companions: Mapping[str, bytes], directory: Path
) -> tuple[tuple[TensorSpec, ...], tuple[Bucket, ...]]:
    """Write the adapter (`whole_adapter`) as a PEFT directory, synced, with the companions.

    Returns what a manifest says of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in companions.items():
        (directory / name).write_bytes(content)
    path = directory / ADAPTER_FILE
    save_file(tensors, path, metadata={"format": "pt"})
    sync_file(path)
    config = {**asdict(model.peft_config[_NAME]), "inference_mode": True}
    # Sets in a fixed order, so that the same adapter has the same bytes.
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)
    write_text(directory / ADAPTER_CONFIG, text)
    specs = tuple(
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), path.name) for name, t in tensors.items()
    )
    return specs, (Bucket(path.name, path.stat().st_size, file_sha256(path)),)


def adapter_form(tensors: Iterable[TensorSpec], digests: Mapping[str, str]) -> AdapterForm:
    """What a manifest says of the adapter that `write_adapter` wrote; `digests` are those of its base.

    Names look like `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, A being [r, in].
    """
    layers = [(spec.name.rpartition(".lora_A.")[0], spec.shape[0]) for spec in tensors if ".lora_A." in spec.name]
    base = hashlib.sha256("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode())
    return AdapterForm(
        rank=max(rank for _, rank in layers),
        target_modules=tuple(sorted({name.rpartition(".")[2] for name, _ in layers})),
        base=base.hexdigest(),
    )


def merged_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The `tensors` of a model as one without an adapter has them: names of its own, the adapter, if any, added.

    Added in float32 and rounded once. The model itself stays as it is: adding in place and taking out again would not
    restore every bit.
    """
    adapted = {
        f"{name}{_BASE_LAYER}.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    return {
        name.replace(_BASE_LAYER, ""): _merged(adapted[name], tensor, *_halves(name, tensors))
        if name in adapted
        else tensor
        for name, tensor in tensors.items()
        if ".lora_" not in name
    }


def _halves(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the adapter on the weight of that name: A [r, in] and B [out, r]."""
    layer = name.removesuffix(f"{_BASE_LAYER}.weight")
    first, second = (tensors[f"{layer}.lora_{half}.{_NAME}.weight"] for half in "AB")
    return first, second


def _merged(layer: Any, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    delta: Tensor = second.float() @ first.float() * layer.scaling[_NAME]
    merged: Tensor = (weight.float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)
    return merged


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The base model inside, the policy again after it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_digests(base: Path) -> dict[str, str]:
    """sha256 of every weights file of the directory that an adapter is trained on, by name."""
    return {file.name: file_sha256(file) for file in sorted(base.glob("*.safetensors"))}


def write_base(policy_dir: Path, digests: Mapping[str, str]) -> None:
    """Into a checkpoint's policy: which weights its adapter belongs to."""
    write_text(policy_dir / BASE_FILE, json.dumps(digests, indent=1))


def check_base(policy_dir: Path, base: Path, digests: Mapping[str, str]) -> None:
    """Raises CheckpointError where the adapter was trained on other weights."""
    if json.loads((policy_dir / BASE_FILE).read_text()) != digests:
        raise CheckpointError(
            f"{policy_dir} holds an adapter of other weights than those now in model.path={base}: put the former back"
        )


def adapter_in(policy_dir: Path, lora: LoraConfig | None) -> Path | None:
    """The directory itself where a checkpoint's policy is an adapter, None where it is whole weights.

    Raises CheckpointError where the settings say the other.
    """
    found = (policy_dir / ADAPTER_CONFIG).exists()
    if found != (lora is not None):
        holds, wanted = ("an adapter", "train.lora is not set") if found else ("whole weights", "train.lora is set")
        raise CheckpointError(f"{policy_dir} holds {holds}, but {wanted}: a run keeps to one of them")
    return policy_dir if found else None
