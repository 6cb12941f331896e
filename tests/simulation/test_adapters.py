"""Rollouts on adapters: they slow the steps that they are in, and their versions stop nobody."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deploy.simulation.engine import Engine, Sequence
from deploy.simulation.scene import Scene
from rollout.errors import ConfigError
from services.config import FleetOptions
from services.step_room import StepRoom
from tests.simulation.kit import MODEL, SEATS, TRAINING, Bench, scene, told


def on_adapters(one: Scene, **sharing: Any) -> Scene:
    found = FleetOptions.model_validate({"sharing": {"mode": "adapter", **sharing}}).sharing
    return replace(one, options=one.options.model_copy(update={"sharing": found}))


def test_a_new_adapter_pauses_nobody_and_samples_go_on() -> None:
    async def inside() -> None:
        model = MODEL.model_copy(update={"pause_s": 0.5, "arrive_s": 3.0, "drift": 0.0})
        bench = Bench(on_adapters(replace(scene(guard=False), model=model, training=TRAINING)))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        running, began = set(bench.replica.engine.running), bench.now
        bench.work.version = 1
        bench.replica.push()
        bench.step()
        bench.step()
        assert bench.replica._version == 1
        assert set(bench.replica.engine.running) <= running
        assert (bench.replica.tally.cuts, bench.replica.tally.prefilled_again) == (0, 0)
        assert bench.now - began <= 3 * model.adapter_slowness * model.step_s(SEATS)

    asyncio.run(inside())


def test_rollouts_on_an_adapter_slow_the_steps_that_they_are_in() -> None:
    for slowness in (1.0, 3.0):
        model = MODEL.model_copy(update={"drift": 0.0, "adapter_slowness": slowness})
        for user, factor in ((True, 1.0), (False, slowness)):
            engine = Engine(model, most_tokens=64, adapters=True, room=StepRoom(), seed=0)
            engine.running = [Sequence(10, 5, 0, user=True), Sequence(10, 5, 0, user=user)]
            engine.begin(0.0)
            assert engine.ends_at == pytest.approx(factor * model.step_s(2))


def test_users_beside_rollouts_on_adapters_are_slower_than_beside_the_same_weights() -> None:
    one = scene(guard=False)
    shared, apart = told(one, 2.0), told(on_adapters(one), 2.0)
    assert sum(apart.tpot_s) / len(apart.tpot_s) > 1.5 * sum(shared.tpot_s) / len(shared.tpot_s)
    assert apart.parts.harvest_s < 0.7 * shared.parts.harvest_s
    on_adapters(one).check()


def test_users_on_an_adapter_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.sharing\.user_adapter=mine is not modelled: adapter_slowness"):
        on_adapters(scene(), user_adapter="mine").check()
