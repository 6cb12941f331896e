"""What LoRA settings are refused, and where they are read from."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.config import load
from tests.unit.test_train_config import BASE
from trainer.config import TrainConfig


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"dropout": 0.1}, r"lora.dropout=0.1: engines sample without dropout, .* it has to be 0"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "lora.target_modules names lm_head: adapters are for linear layers",
        ),
        ({"r": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than 0"),
        ({"publish": "base"}, "Input should be 'merged' or 'adapter'"),
        ({"rank": 4}, "Extra inputs are not permitted"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**BASE, "lora": lora})


def test_without_its_section_every_weight_trains() -> None:
    assert TrainConfig.model_validate(BASE).lora is None
    assert TrainConfig.model_validate({**BASE, "lora": {}}).lora is not None


@pytest.mark.usefixtures("command_process")
def test_files_and_flags_set_it(toml: Path) -> None:
    toml.write_text(toml.read_text() + '\n[train.lora]\nr = 8\ntarget_modules = ["q_proj"]\n')
    lora = load([toml], ["--train.lora.alpha", "4"]).train_config().lora
    assert lora is not None
    assert (lora.r, lora.alpha, lora.target_modules) == (8, 4.0, ("q_proj",))
