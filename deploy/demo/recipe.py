"""A recipe: a configuration file with the algorithm and the workers of a run, laid over the demo's own settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.config import absolute, read_toml
from rollout.errors import ConfigError

_OF_THE_DEMO = frozenset(
    {
        "run",
        "fleet_name",
        "state_dir",
        "model",
        "redis",
        "rewards",
        "train.runs_dir",
        "train.prompts",
        "train.reward",
        "train.reward_model.path",
        "train.ray_address",
    }
)
"""What a recipe for the demo leaves out: where it lives, its policy, prompts and rewards."""
SETTINGS, KEPT = "nightshift.toml", "recipe.toml"
"""In the directory of a demo: its own settings, and the recipe it was begun with."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file, as it was read."""

    path: Path
    text: str
    tables: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def steps(self) -> int | None:
        """Of training, where the recipe says; flags may ask for others."""
        return self._train.get("steps")

    @property
    def has_reward_model(self) -> bool:
        return "reward_model" in self._train

    @property
    def scored_by(self) -> tuple[str, ...]:
        """Tables of [train] that the demo's reward model is for: a critic starts from it, because it knows already
        which letters are wrong.
        """
        return tuple(role for role in ("reward_model", "critic") if self.has_reward_model and role in self._train)

    @property
    def _train(self) -> Mapping[str, Any]:
        table = self.tables.get("train")
        return table if isinstance(table, dict) else {}

    def error(self, problem: object) -> ConfigError:
        """That names the file."""
        return ConfigError(f"--recipe {self.path}: {problem}")


def read_recipe(path: Path) -> Recipe:
    """Raises ConfigError for a file that cannot be read, or that says what is the demo's to say."""
    tables = read_toml(path)
    recipe = Recipe(path, absolute(path).read_text(), tables)
    if taken := sorted(_OF_THE_DEMO.intersection(_keys(recipe.tables))):
        raise recipe.error(
            f"{', '.join(taken)} {'is' if len(taken) == 1 else 'are'} the demo's own: leave"
            f" {'it' if len(taken) == 1 else 'them'} out, or run the file with `nightshift train -c {path}`"
        )
    return recipe


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, tables included."""
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def check_resumed(directory: Path, recipe: Recipe | None) -> None:
    """Raises ConfigError where the demo in `directory` was begun with a recipe and goes on without, or the reverse."""
    if not (directory / SETTINGS).exists():
        return  # it ended before it wrote how it was begun
    begun = (directory / KEPT).exists()
    if begun and recipe is None:
        raise ConfigError(f"--resume: {directory} was begun with a recipe ({directory / KEPT}); give it with --recipe")
    if recipe is not None and not begun:
        raise recipe.error(
            f"--resume: {directory} was begun without a recipe; leave --recipe out, or choose another --dir"
        )


def keep(directory: Path, recipe: Recipe) -> Path:
    """The copy that the run is trained by."""
    path = directory / KEPT
    path.write_text(recipe.text)
    return path
