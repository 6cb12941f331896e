"""Engines that have no second model say why, and wait for none that is being made."""

import copy
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services import weights_ahead
from services.breaks import Breaks, Pace
from services.weights_ahead import WeightsAhead, ahead_refusal


def config(**other: Any) -> Any:
    """Of an engine that has one."""
    attention, compilation = torch.nn.Module(), SimpleNamespace(static_forward_context={})
    compilation.static_forward_context["layers.0.attn"] = attention
    plain = {
        "model_config": SimpleNamespace(enforce_eager=True),
        "lora_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "compilation_config": compilation,
    }
    return SimpleNamespace(**plain | other)


def test_a_plain_model_has_a_second_one() -> None:
    assert ahead_refusal(config()) == ""


def experts() -> Any:
    layers = {"layers.0.attn": torch.nn.Module(), "layers.0.mlp.experts": torch.nn.Linear(2, 2)}
    return SimpleNamespace(static_forward_context=layers)


def sinks() -> Any:
    attention = torch.nn.Module()
    attention.impl = SimpleNamespace(num_heads=2, sinks=torch.zeros(2))
    return SimpleNamespace(static_forward_context={"layers.0.attn": attention})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model_config": SimpleNamespace(enforce_eager=False)}, "compiled"),
        ({"lora_config": object()}, "adapters"),
        ({"speculative_config": object()}, "drafter"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "data-parallel"),
        ({"compilation_config": experts()}, "by name, such as layers.0.mlp.experts"),
        ({"compilation_config": sinks()}, "by name, such as layers.0.attn"),
    ],
)
def test_a_model_that_more_than_itself_refers_to_has_none(other: dict[str, Any], why: str) -> None:
    assert why in ahead_refusal(config(**other))


class Slow:
    """Weights of which the second comes when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.zeros(1)
        self.begun.set()
        assert self.go_on.wait(30)
        yield "second", torch.zeros(1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """In place of what vLLM reads; its own models and loading are not needed here."""
    weights = Slow()
    stand_ins = {
        "_weights": weights,
        "twin": copy.deepcopy,
        "reload_weights": lambda _config, _spare, weights, *_: list(weights),
        "finalize_layerwise_reload": lambda *_: None,
        "set_current_vllm_config": lambda _: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(weights_ahead, name, stand_in)
    yield weights
    weights.go_on.set()


def test_nobody_waits_for_a_preparation_that_hangs_and_the_next_but_one_is_taken(slow: Slow) -> None:
    runner = SimpleNamespace(model=(first := torch.nn.Linear(1, 1)))
    ahead = WeightsAhead()

    def begin(directory: str) -> None:
        ahead.begin(runner.model, config(), directory, lambda _: None)

    begin("a")
    assert slow.begun.wait(30)
    assert ahead.over() == (False, "")
    assert "not over" in ahead.take(runner, "a")
    begin("b")
    assert ahead.over() == (True, "the preparation before it has not ended")
    slow.go_on.set()
    ahead.end()
    assert "nothing" in ahead.take(runner, "a")
    begin("c")
    while not ahead.over()[0]:
        pass
    assert ahead.take(runner, "a") == "c is prepared"
    assert runner.model is first
    begin("c")
    while not ahead.over()[0]:
        pass
    assert ahead.take(runner, "c") == ""
    second = runner.model
    assert second is not first
    begin("d")
    while not ahead.over()[0]:
        pass
    assert ahead.take(runner, "d") == ""
    assert runner.model is first
    ahead.put_back(runner)
    assert runner.model is first


def test_a_preparation_rests_between_weights_as_long_as_it_may(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    seconds = itertools.count(step=1.0)
    monkeypatch.setattr(weights_ahead, "Breaks", partial(Breaks, computed=lambda: next(seconds), sleep=rests.append))
    ahead, model = WeightsAhead(), torch.nn.Linear(1, 1)
    slow.go_on.set()
    for pace, rest_s, rested_s in ((Pace.GENTLE, 0.0, 0.0), (Pace.FREE, 4.0, 0.0), (Pace.GENTLE, 4.0, 4.0)):
        ahead.pace = pace
        ahead.begin(model, config(), "a", lambda _: None, rest_s=rest_s)
        while not ahead.over()[0]:
            pass
        assert sum(rests) == rested_s


def test_a_preparation_that_is_held_begins_when_it_is_not_any_more(slow: Slow) -> None:
    ahead, model = WeightsAhead(), torch.nn.Linear(1, 1)
    slow.go_on.set()
    ahead.pace = Pace.HELD
    ahead.begin(model, config(), "a", lambda _: None, rest_s=60.0)
    assert not slow.begun.wait(0.3)
    assert ahead.over() == (False, "")
    ahead.pace = Pace.GENTLE
    assert slow.begun.wait(30)
    ahead.end()


def test_one_that_is_held_is_given_up_at_once(slow: Slow) -> None:
    ahead, model = WeightsAhead(), torch.nn.Linear(1, 1)
    slow.go_on.set()
    ahead.pace = Pace.HELD
    ahead.begin(model, config(), "a", lambda _: None, rest_s=60.0)
    started = time.monotonic()
    ahead.end()
    assert time.monotonic() - started < 5
    assert ahead.over() == (True, "nothing is prepared")
