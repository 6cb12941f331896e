"""Engines that have no second model say why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.weights_ahead import ahead_refusal


def config(**other: Any) -> Any:
    """Of an engine that has one."""
    attention, compilation = torch.nn.Module(), SimpleNamespace(static_forward_context={})
    compilation.static_forward_context["layers.0.attn"] = attention
    plain = {
        "model_config": SimpleNamespace(enforce_eager=True),
        "lora_config": None,
        "speculative_config": None,
        "compilation_config": compilation,
    }
    return SimpleNamespace(**plain | other)


def test_a_plain_model_has_a_second_one() -> None:
    assert ahead_refusal(config()) == ""


def experts() -> Any:
    layers = {"layers.0.attn": torch.nn.Module(), "layers.0.mlp.experts": torch.nn.Linear(2, 2)}
    return SimpleNamespace(static_forward_context=layers)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model_config": SimpleNamespace(enforce_eager=False)}, "compiled"),
        ({"lora_config": object()}, "adapters"),
        ({"speculative_config": object()}, "drafter"),
        ({"compilation_config": experts()}, "by name, such as layers.0.mlp.experts"),
    ],
)
def test_a_model_that_more_than_itself_refers_to_has_none(other: dict[str, Any], why: str) -> None:
    assert why in ahead_refusal(config(**other))
