"""The demo's configuration: ordinary TOML files that `nightshift serve` and `nightshift train` would take as well."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.config import NightshiftConfig, load
from deploy.demo.models import Models
from deploy.demo.recipe import SETTINGS, Recipe, keep
from deploy.demo.task import MAX_NEW_TOKENS, REWARD, REWARD_PARAMS
from deploy.preflight import check_sharing
from rollout.errors import ConfigError

BATCH_GROUPS = 32
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_TEMPLATE = """\
# Written by `nightshift demo`, without the flags it was given. The same file works with `nightshift serve` and
# `nightshift train`; where there is a recipe.toml beside it, `train` takes that too: -c nightshift.toml -c recipe.toml.
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
target_utilisation = 0.05
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


def check_settings(
    directory: Path, *, steps: int, flags: Sequence[str], recipe: Recipe | None = None
) -> NightshiftConfig:
    """What the demo would run with, before anything of it exists; nothing is written beside it. Raises ConfigError."""
    later = directory / "absent"
    with tempfile.TemporaryDirectory(prefix="ns-demo-") as elsewhere:
        text = _toml(directory, Models(later, later), recipe, prompts=(later, later), steps=steps)
        return _load(directory, _write(Path(elsewhere), text, recipe), recipe, flags)


def demo_config(
    directory: Path,
    *,
    models: Models,
    prompts: tuple[Path, Path],
    steps: int,
    flags: Sequence[str],
    recipe: Recipe | None = None,
) -> tuple[NightshiftConfig, list[Path]]:
    """Write `directory`/nightshift.toml and a copy of the recipe, and load them with the flags on top.

    Returns the configuration and the files, of which the later one wins. Raises ConfigError.
    """
    files = _write(directory, _toml(directory, models, recipe, prompts=prompts, steps=steps), recipe)
    return _load(directory, files, recipe, flags), files


def _write(directory: Path, text: str, recipe: Recipe | None) -> list[Path]:
    path = directory / SETTINGS
    path.write_text(text)
    return [path] if recipe is None else [path, keep(directory, recipe)]


def _toml(directory: Path, models: Models, recipe: Recipe | None, *, prompts: tuple[Path, Path], steps: int) -> str:
    values = {
        "run": run_name(directory),
        "state_dir": str(directory / ".nightshift"),
        "model": str(models.policy),
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
    text = _TEMPLATE.format(**quoted, params=_inline_table(REWARD_PARAMS))
    return text + "".join(
        f"\n[train.{role}]\npath = {json.dumps(str(models.reward))}\n" for role in (recipe.scored_by if recipe else ())
    )


def _load(directory: Path, files: Sequence[Path], recipe: Recipe | None, flags: Sequence[str]) -> NightshiftConfig:
    config = load(files, flags) if recipe is None else _with_recipe(files, recipe, flags)
    train = config.train_config()
    check_sharing(config.fleet_config(), train)
    run_dir = train.run_dir
    if run_dir.resolve() != directory.resolve():
        raise ConfigError(
            f"run={config.run} and train.runs_dir={run_dir.parent} put the run into {run_dir}, but the demo lives in"
            f" {directory}: leave them out (flags, NIGHTSHIFT_RUN, NIGHTSHIFT_TRAIN__RUNS_DIR) and choose with --dir"
        )
    return config


def _with_recipe(files: Sequence[Path], recipe: Recipe, flags: Sequence[str]) -> NightshiftConfig:
    """An error that the demo's own file and the flags do not make names the recipe."""
    try:
        config = load(files, flags)
        config.train_config()
    except ConfigError as error:
        if str(error) == _error_of(files[:1], flags):
            raise
        raise recipe.error(error) from error
    return config


def _error_of(files: Sequence[Path], flags: Sequence[str]) -> str | None:
    try:
        load(files, flags).train_config()
    except ConfigError as error:
        return str(error)
    return None


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
