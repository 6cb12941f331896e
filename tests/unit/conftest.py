"""What tests of the command line share."""

from pathlib import Path

import pytest

from tests.tiny_models import build_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    build_policy(directory, "llama_untied")
    return directory


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "nightshift.toml"
    path.write_text(
        f'state_dir = "{tmp_path}/state"\n[model]\npath = "{model}"\n[redis]\ndir = "{tmp_path}/redis"\n'
        f'[train]\nruns_dir = "{tmp_path}/runs"\n[train.prompts]\ntrain = "{tmp_path}/absent.jsonl"\n'
        '[train.reward]\nname = "exact_match"\n'
    )
    return path
