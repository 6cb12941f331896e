"""Settings that cannot work are refused at parse, with both values and the knob."""

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import TrainConfig

BASE: dict[str, Any] = {
    "model": {"path": "/models/m"},
    "prompts": {"train": "train.jsonl"},
    "reward": {"name": "exact_match"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"n": 1}, "staleness": {"min_group_samples": 1}}, "grpo compares samples"),
        ({"sampling": {"top_p": 0.9}}, r"top_p=0.9, top_k=0: training needs top_p=1"),
        ({"sampling": {"top_k": 5}}, r"top_k=5: training needs"),
        ({"sampling": {"temperature": 0}}, "greater than 0"),
        ({"staleness": {"min_group_samples": 9}}, r"min_group_samples=9 is above sampling.n=8"),
        ({"workers": {"dtype": "bfloat16"}}, "needs zero_stage=1 or 2"),
        ({"workers": {"zero_stage": 3}}, "Input should be 0, 1 or 2"),
        ({"push": {"backend": "nccl"}}, r"needs workers.device=cuda"),
        ({"push": {"op_timeout_s": 20}}, "must be above op_timeout_s=20"),
        ({"algorithm": {"clip_low": 1.0}}, "less than 1"),
        ({"algorithm": {"kl_estimator": "k1"}}, "its gradient's expectation is 0: use k2 or k3"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"stepz": 3}, "Extra inputs are not permitted"),
        ({"run": "Not A Name"}, "String should match"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**BASE, **change})


def test_the_defaults_are_consistent_and_survive_json() -> None:
    config = TrainConfig.model_validate(BASE)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
