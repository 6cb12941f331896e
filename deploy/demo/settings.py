"""The demo's configuration: an ordinary TOML file that `nightshift serve` and `nightshift train` would take as well."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.config import NightshiftConfig, load
from deploy.demo.task import MAX_NEW_TOKENS, REWARD, REWARD_PARAMS
from rollout.errors import ConfigError

BATCH_GROUPS = 32
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_TEMPLATE = """\
# Written by `nightshift demo`. The same file works with `nightshift serve` and `nightshift train`.
run = {run}
fleet_name = "demo"
state_dir = {state_dir}

[model]
path = {model}
name = "policy"

[redis]
dir = {redis_dir}

[fleet.engine]
dtype = "float32"
max_model_len = 128
max_num_seqs = 72
max_num_batched_tokens = 2048

[fleet.harvest]
user_reserve = 8

[fleet.autoscaling]
min_replicas = 1
max_replicas = 2
target_ongoing_requests = 2.0
upscale_delay_s = 1.0

[train]
runs_dir = {runs_dir}
steps = {steps}
batch_groups = {batch_groups}

[train.prompts]
train = {train}
eval = {eval}
max_prompt_tokens = 32

[train.reward]
name = {reward}
params = {params}

[train.sampling]
n = 8
max_tokens = {max_tokens}

[train.algorithm]
correction = "tis"

[train.staleness]
eta = 1

[train.optimizer]
lr = 3e-4
betas = [0.9, 0.95]

[train.workers]
cpus = 0.1
max_tokens_per_micro_batch = 2048

[train.checkpoint]
every = 20

[train.evaluation]
n = 8
"""


def check_settings(directory: Path, *, steps: int, flags: Sequence[str]) -> NightshiftConfig:
    """What the demo would run with, before anything of it exists; nothing is written beside it. Raises ConfigError."""
    later = directory / "absent"
    with tempfile.TemporaryDirectory(prefix="ns-demo-") as elsewhere:
        path = Path(elsewhere) / "nightshift.toml"
        path.write_text(_toml(directory, model=later, prompts=(later, later), steps=steps))
        return _load(directory, path, flags)


def demo_config(
    directory: Path, *, model: Path, prompts: tuple[Path, Path], steps: int, flags: Sequence[str]
) -> tuple[NightshiftConfig, Path]:
    """Write `directory`/nightshift.toml and load it with the flags on top; returns both. Raises ConfigError."""
    path = directory / "nightshift.toml"
    path.write_text(_toml(directory, model=model, prompts=prompts, steps=steps))
    return _load(directory, path, flags), path


def _toml(directory: Path, *, model: Path, prompts: tuple[Path, Path], steps: int) -> str:
    values = {
        "run": run_name(directory),
        "state_dir": str(directory / ".nightshift"),
        "model": str(model),
        "redis_dir": str(directory / ".redis"),
        "runs_dir": str(directory.parent),
        "steps": steps,
        "batch_groups": BATCH_GROUPS,
        "train": str(prompts[0]),
        "eval": str(prompts[1]),
        "reward": REWARD,
        "max_tokens": MAX_NEW_TOKENS,
    }
    # A JSON string or number is also a TOML one.
    quoted = {name: json.dumps(value) for name, value in values.items()}
    return _TEMPLATE.format(**quoted, params=_inline_table(REWARD_PARAMS))


def _load(directory: Path, path: Path, flags: Sequence[str]) -> NightshiftConfig:
    config = load([path], flags)
    config.fleet_config()
    run_dir = config.train_config().run_dir
    if run_dir.resolve() != directory.resolve():
        raise ConfigError(
            f"run={config.run} and train.runs_dir={run_dir.parent} put the run into {run_dir}, but the demo lives in"
            f" {directory}: leave them out (flags, NIGHTSHIFT_RUN, NIGHTSHIFT_TRAIN__RUNS_DIR) and choose with --dir"
        )
    return config


def run_name(directory: Path) -> str:
    """The run is named like its directory. Raises ConfigError where that is no run name."""
    if not _NAME.fullmatch(directory.name):
        raise ConfigError(
            f"--dir {directory}: its last part names the run and must be lower-case letters, digits, '.', '_' or '-', "
            "starting with a letter or digit, 63 at most"
        )
    return directory.name


def _inline_table(values: dict[str, object]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"
