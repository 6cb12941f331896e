from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig as ServeConfig

from services.app import autoscaling
from services.autoscaling import UserLoadPolicy
from services.config import AutoscalingConfig

BUDGET = {"windows": ["22:00-06:00", "12:00-13:00"], "extra_replicas": 2}

WRONG = [
    ({"min_replicas": 3, "max_replicas": 2}, ["min_replicas=3", "max_replicas=2"]),
    ({"downscale_delay_s": 10, "rate_window_s": 60}, ["downscale_delay_s=10", "rate_window_s=60"]),
    (
        {"max_replicas": 3, "rollout_budget": {**BUDGET, "extra_replicas": 4}},
        ["rollout_budget.extra_replicas=4", "min_replicas=1", "max_replicas=3"],
    ),
    (
        {"max_replicas": 3, "rollout_budget": {**BUDGET, "windows": ["22:00-06:00", "05:30-07:00"]}},
        ["22:00-06:00", "05:30-07:00", "overlap"],
    ),
    ({"max_replicas": 3, "rollout_budget": {**BUDGET, "windows": ["10 pm"]}}, ["'10 pm'", "HH:MM-HH:MM"]),
    ({"max_replicas": 3, "rollout_budget": {**BUDGET, "windows": ["22:00-22:00"]}}, ["22:00-22:00", "same minute"]),
    ({"max_replicas": 3, "rollout_budget": {**BUDGET, "windows": []}}, ["rollout_budget.windows"]),
    ({"max_replicas": 3, "rollout_budget": {**BUDGET, "time_zone": "Mars/Olympus"}}, ["time_zone='Mars/Olympus'"]),
    ({"max_replicas": 3, "rollout_budget": {**BUDGET, "time_zone": "../zone"}}, ["time_zone='../zone'"]),
    ({"target_utilisation": 1.5}, ["target_utilisation"]),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_that_contradict_each_other_are_refused_with_both_values(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValidationError) as refusal:
        AutoscalingConfig.model_validate(settings)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_what_serve_is_given_makes_the_policy(budget: dict[str, Any] | None) -> None:
    config = AutoscalingConfig.model_validate({"max_replicas": 5, "rollout_budget": budget})
    given = ServeConfig(**autoscaling(config))
    assert (given.min_replicas, given.max_replicas, given.initial_replicas) == (1, 5, None)
    assert given.policy.get_policy().__name__ == UserLoadPolicy.__name__
    UserLoadPolicy(**given.policy.policy_kwargs)
