"""A policy's weights as a Hugging Face directory of safetensors buckets, synced to disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollout.durable import sync_file, write_text
from rollout.weights import Bucket, TensorSpec, file_sha256


def split_buckets(sizes: Mapping[str, int], bucket_bytes: int) -> list[list[str]]:
    """Tensor names in order, cut so that a bucket holds at most `bucket_bytes` unless one tensor alone is larger."""
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= size
    return buckets


def write_weights(
    directory: Path, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int
) -> tuple[tuple[TensorSpec, ...], tuple[Bucket, ...]]:
    """Write CPU tensors as buckets (with an index when there are several), synced; returns what a manifest says."""
    groups = split_buckets({name: t.numel() * t.element_size() for name, t in tensors.items()}, bucket_bytes)
    names = [
        "model.safetensors" if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        for i in range(1, len(groups) + 1)
    ]
    buckets, specs = [], []
    for file, group in zip(names, groups, strict=True):
        path = directory / file
        save_file({name: tensors[name] for name in group}, path, metadata={"format": "pt"})
        sync_file(path)
        buckets.append(Bucket(file, path.stat().st_size, file_sha256(path)))
        specs += [
            TensorSpec(n, str(tensors[n].dtype).removeprefix("torch."), tuple(tensors[n].shape), file) for n in group
        ]
    if len(groups) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {spec.name: spec.bucket for spec in specs}}
        write_text(directory / "model.safetensors.index.json", json.dumps(index))
    return tuple(specs), tuple(buckets)
