"""The fleet under test: two engine replicas that share nothing between users and rollouts but their number."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.bench.bench_fleet import BenchFleet

REPLICAS = 2
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_NOISE = 0.002
# A day takes minutes here, so that what an operator sets in minutes is seconds.
_LENDING = """\
[fleet.autoscaling]
min_replicas = {replicas}
max_replicas = {replicas}
[fleet.sharing]
mode = "lend"
[fleet.lending]
production = {{path = {production}, name = "assistant"}}
requests_per_replica = {requests}
lend_after_s = 3
quiet_s = 5
min_gain = 0
"""
_EVER = 1_000_000
"""User requests in flight that one replica is said to serve where the split is static: the other is always lent."""


def lend_fleet(
    directory: Path, *, policy: Path, production: Path, port: int, seats: int, requests: float | None
) -> BenchFleet:
    """`requests` in flight are what a replica is to serve; None: one replica is lent for good."""
    more = _LENDING.format(
        replicas=REPLICAS,
        production=json.dumps(str(production.absolute())),
        requests=_EVER if requests is None else requests,
    )
    return BenchFleet(directory, model=policy, port=port, seats=seats, more=more)


def production_model(policy: Path, directory: Path) -> Path:
    """The policy with other weights, built once: what users are served."""
    if not (directory / _CONFIG).exists() or (directory / _CONFIG).read_text() != (policy / _CONFIG).read_text():
        shutil.rmtree(directory, ignore_errors=True)
        partial = directory.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(policy, partial)
        generator = torch.Generator().manual_seed(1)
        weights = load_file(policy / _WEIGHTS)
        moved = {name: w + _NOISE * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        save_file(moved, partial / _WEIGHTS, metadata={"format": "pt"})
        partial.rename(directory)
    return directory
