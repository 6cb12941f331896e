"""The Nightshift of a soak, as a user would configure one: two small engines, and a trainer whose steps come often."""

import json
from pathlib import Path

from tests.ports import free_port
from tests.running_fleet import write_toml
from tests.tiny_models import build_policy

RUN = "soak"
REPLICAS = 2
CHECKPOINT_EVERY = 3
_PROMPTS = 64
_FOR_EVER = 1_000_000
_TRAIN = """
[train]
runs_dir = "{runs}"
steps = {steps}
batch_groups = 4
[train.prompts]
train = "{prompts}"
[train.reward]
name = "vowels"
[train.sampling]
n = 4
max_tokens = 12
[train.optimizer]
lr = 1e-5
[train.checkpoint]
every = {every}
"""


def write_configuration(directory: Path) -> Path:
    """Model, prompts and one TOML file for `nightshift serve`, `train` and `audit`; returns that."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"one two three {i}"}) + "\n" for i in range(_PROMPTS)))
    train = _TRAIN.format(runs=directory / "runs", steps=_FOR_EVER, prompts=prompts, every=CHECKPOINT_EVERY)
    return write_toml(
        directory,
        model=build_policy(directory / "model"),
        port=free_port(),
        run=RUN,
        min_replicas=REPLICAS,
        max_replicas=REPLICAS,
        more=train,
    )


def run_dir(directory: Path) -> Path:
    """Of the run that the configuration trains."""
    return directory / "runs" / RUN
