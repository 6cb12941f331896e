"""The recipes that come with the project, and what is said to one that cannot be laid over the demo's settings."""

import argparse
from pathlib import Path

import pytest

from deploy import cli
from deploy.config import load
from deploy.demo.asked import Asked, read_arguments, with_steps
from deploy.demo.directory import claim_directory
from deploy.demo.models import Models
from deploy.demo.recipe import KEPT, SETTINGS, read_recipe
from deploy.demo.settings import check_settings, demo_config
from rollout.errors import ConfigError
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("command_process")

FOLDER = Path(__file__).parents[2] / "deploy" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))


def _of_the_demo(recipe: Path, directory: Path) -> TrainConfig:
    return check_settings(directory, steps=7, flags=[], recipe=read_recipe(recipe)).train_config()


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_the_demo(recipe: Path, tmp_path: Path) -> None:
    train = _of_the_demo(recipe, tmp_path / "demo")
    assert train.steps >= 40
    assert (train.reward.name, train.sampling.max_tokens, train.checkpoint.every) == ("reasoning_gym", 13, 20)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_a_configuration_of_ones_own(recipe: Path, toml: Path) -> None:
    flags = ["--train.reward_model.path", "models/reward"] if "[train.reward_model]" in recipe.read_text() else []
    assert load([toml, recipe], flags).train_config().reward.name == "exact_match"


def test_the_recipes_are_what_their_names_say(tmp_path: Path) -> None:
    found = {recipe.stem: _of_the_demo(recipe, tmp_path / "demo") for recipe in RECIPES}
    assert sorted(found) == ["decoupled-ppo", "grpo", "lora", "ppo-critic"]
    assert found["grpo"].algorithm.advantage == "grpo"
    assert found["lora"].lora is not None
    assert "reference" not in found["lora"].group_workers
    assert found["decoupled-ppo"].algorithm.correction == "decoupled"
    ppo = found["ppo-critic"]
    assert (ppo.algorithm.advantage, ppo.workers.world_size, ppo.workers.zero_stage) == ("gae", 2, 2)
    assert set(ppo.group_workers) == {"policy", "critic", "reference", "reward"}


def test_only_grpo_has_to_raise_greedy_accuracy_and_it_begins_where_there_is_room(tmp_path: Path) -> None:
    for recipe in RECIPES:
        demo = check_settings(tmp_path / "demo", steps=7, flags=[], recipe=read_recipe(recipe)).demo
        assert demo.sampled_rise >= 0.15
        assert (demo.warmup, demo.greedy_rise) == (("clean", 0.15) if recipe.stem == "grpo" else ("faulty", None))


def test_the_demo_names_its_reward_model_and_keeps_the_recipe(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    directory.mkdir()
    models, recipe = Models(tmp_path / "policy", tmp_path / "reward"), read_recipe(FOLDER / "ppo-critic.toml")
    prompts = (tmp_path / "t", tmp_path / "e")
    config, files = demo_config(directory, models=models, prompts=prompts, steps=60, flags=[], recipe=recipe)
    assert files == [directory / SETTINGS, directory / KEPT]
    assert files[1].read_text() == recipe.path.read_text()
    assert load(files).train_config() == config.train_config()
    scorer = config.train_config().reward_model
    assert scorer is not None
    assert (scorer.path, scorer.weight) == (tmp_path / "reward", 0.5)
    critic = config.train_config().critic
    assert critic is not None
    assert (critic.path, critic.warmup_steps) == (tmp_path / "reward", 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train.critc]\n", ["train.critc", "unknown key"]),
        ("[train.algorithm]\nadvantage = 'ppo'\n", ["train.algorithm.advantage", "'ppo'"]),
        ("[train.algorithm]\nadvantage = 'gae'\n", ["advantage=gae", "critic"]),
        ("[demo]\nwarm = 'clean'\n", ["demo.warm", "unknown key", "warmup"]),
        ("[demo]\nwarmup = 'cold'\n", ["demo.warmup", "'cold'", "'clean'"]),
        ("[train\n", ["not valid TOML"]),
        ("[model]\npath = 'x'\n[train.reward]\nname = 'mine'\n", ["model, train.reward are", "nightshift train -c"]),
        ("[train.reward_model]\npath = 'x'\n", ["train.reward_model.path is", "leave it out"]),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_line_that_names_file_and_key(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, text)
    assert cli.run(["demo", "--recipe", str(path), "--dir", str(tmp_path / "demo")]) == cli.USAGE
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    for word in [str(path), *words]:
        assert word in said
    assert not (tmp_path / "demo").exists()


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--recipe", str(tmp_path / "nope.toml")]) == cli.USAGE
    assert "nope.toml: cannot be read: No such file" in capsys.readouterr().err


def test_a_wrong_flag_is_not_blamed_on_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_settings(
            tmp_path / "demo", steps=7, flags=["--train.typo", "1"], recipe=read_recipe(FOLDER / "grpo.toml")
        )
    assert str(refused.value).startswith("--train.typo: unknown flag")


def _asked(
    directory: Path | None, recipe: Path | None, *flags: str, steps: int | None = None, resume: bool = False
) -> Asked:
    args = argparse.Namespace(dir=directory, recipe=recipe, steps=steps, resume=resume)
    return read_arguments(args, flags)


def test_steps_asked_for_beat_the_recipe_and_a_flag_beats_both(tmp_path: Path) -> None:
    recipe = FOLDER / "grpo.toml"
    assert _asked(tmp_path / "demo", recipe).steps == 80
    assert _asked(tmp_path / "demo", recipe, steps=6).steps == 6
    assert _asked(tmp_path / "demo", recipe, "--train.steps", "8", steps=6).steps == 8
    assert with_steps(6, ["--train.steps=8"]) == ["--train.steps=8"]


def test_a_run_by_a_recipe_has_a_directory_of_its_own() -> None:
    asked = _asked(None, FOLDER / "grpo.toml")
    assert asked.directory == Path("runs/demo-grpo").absolute()
    assert asked.resuming == f"nightshift demo --resume --recipe {FOLDER / 'grpo.toml'}"
    assert _asked(None, None).directory == Path("runs/demo").absolute()


def test_a_demo_is_resumed_with_the_recipe_it_was_begun_with_or_not_at_all(tmp_path: Path) -> None:
    directory, recipe = tmp_path / "demo", FOLDER / "grpo.toml"
    claim_directory(directory, resume=False).close()
    (directory / SETTINGS).touch()
    with pytest.raises(ConfigError, match="begun without a recipe"):
        _asked(directory, recipe, resume=True).claim()
    (directory / KEPT).touch()
    with pytest.raises(ConfigError, match="begun with a recipe"):
        _asked(directory, None, resume=True).claim()
    _asked(directory, recipe, resume=True).claim().close()
