"""What a command line asks of the demo, checked before anything of an earlier run is touched."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deploy.config import NightshiftConfig
from deploy.demo.directory import claim_directory
from deploy.demo.goals import STEPS
from deploy.demo.recipe import Recipe, check_resumed, read_recipe
from deploy.demo.settings import check_settings
from rollout.errors import ConfigError

_STEPS_FLAG = "--train.steps"


@dataclass(frozen=True, slots=True)
class Asked:
    """One demo, as it was asked for."""

    directory: Path
    recipe: Recipe | None
    resume: bool
    flags: Sequence[str]
    """For `nightshift train`, too."""
    settings: NightshiftConfig
    """What it would run with; the paths of models and prompts are not known yet."""
    resuming: str
    """The command that goes on where this one stops."""

    @property
    def steps(self) -> int:
        return self.settings.train_config().steps

    def claim(self) -> IO[str]:
        """The directory, as `claim_directory`; raises ConfigError also where it is resumed otherwise than begun."""
        lock = claim_directory(self.directory, resume=self.resume)
        try:
            if self.resume:
                check_resumed(self.directory, self.recipe)
        except ConfigError:
            lock.close()
            raise
        return lock


def read_arguments(args: argparse.Namespace, flags: Sequence[str]) -> Asked:
    """Raises ConfigError."""
    recipe = None if args.recipe is None else read_recipe(args.recipe)
    directory: Path = (args.dir or default_directory(recipe)).absolute()
    flags = with_steps(args.steps, flags)
    settings = check_settings(directory, steps=args.steps or STEPS, flags=flags, recipe=recipe)
    return Asked(directory, recipe, args.resume, flags, settings, _resuming(args))


def default_directory(recipe: Recipe | None) -> Path:
    """Where the run lives unless --dir says."""
    return Path("runs") / ("demo" if recipe is None else f"demo-{recipe.name}")


def with_steps(steps: int | None, flags: Sequence[str]) -> list[str]:
    """With --steps as the flag it stands for, which beats a recipe, unless that is given, too."""
    given = any(flag.partition("=")[0] == _STEPS_FLAG for flag in flags)
    return [*flags] if steps is None or given else [_STEPS_FLAG, str(steps), *flags]


def _resuming(args: argparse.Namespace) -> str:
    given = ((name, getattr(args, name)) for name in ("recipe", "dir"))
    return " ".join(["nightshift demo --resume", *(f"--{name} {value}" for name, value in given if value is not None)])
