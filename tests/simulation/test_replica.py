"""A simulated replica keeps what the product promises: seats, tokens, users first; and repeats itself."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.simulation.engine import Engine, Sequence
from deploy.simulation.replica import BLOCK
from deploy.simulation.work import Work
from rollout.errors import ConfigError
from services.config import FleetOptions
from services.push_config import PushConfig
from services.slo import SloConfig
from services.step_room import StepRoom
from tests.simulation.kit import MODEL, SEATS, TRAINING, Bench, scene, told
from trainer.config import StalenessConfig


@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "look", "push", "step", "step", "step"]), st.integers(1, 60)), max_size=120
    ),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_tokens_made_are_tokens_had_and_nobody_sits_without_a_seat(events: list[tuple[str, int]], guard: bool) -> None:
    async def inside() -> None:
        bench = Bench(scene(guard=guard))
        asked = 0
        bench.replica.look()
        for name, size in events:
            if name == "user":
                bench.replica.arrive(bench.now, size, size)
                asked += size
            elif name == "look":
                bench.now += 0.001
                bench.replica.look()
            elif name == "push":
                bench.replica.push()
            elif bench.replica.next_at is not None:
                bench.step()
            tally = bench.replica.tally
            assert len(bench.replica.engine.running) <= SEATS
            assert bench.replica.engine.generated == tally.user_tokens + tally.rollout_tokens
            assert tally.user_tokens <= asked
        while bench.replica.users:
            bench.step()
        assert bench.replica.tally.user_tokens == asked == sum(felt.tokens for felt in bench.felt)

    asyncio.run(inside())


def test_a_user_who_finds_every_seat_taken_gets_one_after_the_step_that_runs() -> None:
    async def inside() -> None:
        bench = Bench(scene(guard=False))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        kept = bench.replica.tally.rollout_tokens
        bench.replica.arrive(bench.now, 10, 1)
        bench.step()
        assert bench.replica.tally.cuts == 1
        assert bench.replica.tally.rollout_tokens == kept + SEATS - 1  # the cut one loses the token in flight alone
        bench.step()
        assert len(bench.felt) == 1

    asyncio.run(inside())


def test_after_a_push_users_go_on_with_what_was_computed_and_rollouts_are_prefilled_again() -> None:
    async def inside() -> None:
        bench = Bench(scene(guard=False))
        bench.replica.look()
        bench.replica.arrive(bench.now, 10, 50)
        while bench.replica.rollouts < SEATS - 1 or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        running = set(bench.replica.engine.running)
        bench.replica.push()
        bench.step()
        while not any(not s.user for s in bench.replica.engine.running):
            bench.step()
        fresh = {s.user: s.fresh for s in bench.replica.engine.running}
        assert fresh[True] == 0
        assert fresh[False] > 0
        assert {s for s in bench.replica.engine.running if s.user} <= running

    asyncio.run(inside())


def test_rollouts_that_keep_what_is_computed_go_on_after_a_push() -> None:
    async def inside() -> None:
        one = scene(guard=False)
        options = one.options.model_copy(update={"push": PushConfig(rollouts="keep")})
        bench = Bench(replace(one, options=options))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        running = set(bench.replica.engine.running)
        bench.replica.push()
        bench.step()
        while not bench.replica.engine.running:
            bench.step()
        assert set(bench.replica.engine.running) <= running
        assert (bench.replica.tally.cuts, bench.replica.tally.prefilled_again) == (0, 0)
        bench.replica.arrive(bench.now, 10, 1)
        bench.step()
        bench.replica.push()
        while not bench.replica.tally.prefilled_again:
            bench.step()
        assert bench.replica.tally.cuts == 1
        assert bench.replica.tally.prefilled_again <= BLOCK

    asyncio.run(inside())


def test_after_a_push_users_who_waited_have_their_first_token_before_a_rollout_is_back() -> None:
    async def inside() -> None:
        bench = Bench(scene(guard=False))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        bench.replica.push()
        bench.step()
        bench.replica.arrive(bench.now, 10, 50)
        while not bench.replica.engine.running:
            bench.step()
        assert [s.user for s in bench.replica.engine.running] == [True]
        bench.step()
        assert not all(s.user for s in bench.replica.engine.running)

    asyncio.run(inside())


def test_groups_stay_through_a_push_that_takes_longer_than_a_group_waits_for_a_seat() -> None:
    async def inside() -> None:
        one = scene(guard=False, give_back_s=1.0)
        bench = Bench(replace(one, model=MODEL.model_copy(update={"pause_s": 3.0})))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        held = list(bench.replica._held)
        bench.replica.push()
        bench.step()
        began = bench.now
        while bench.now < began + 2.5:
            bench.now += 0.1
            bench.replica.look()
        assert bench.replica._held == held

    asyncio.run(inside())


def test_while_new_weights_arrive_steps_take_longer_and_then_generation_stands_still() -> None:
    async def inside() -> None:
        one = scene(guard=False)
        model = MODEL.model_copy(update={"arrive_s": 1.0, "arrive_slowness": 1.5, "pause_s": 0.25, "drift": 0.0})
        bench = Bench(replace(one, model=model))
        bench.replica.look()
        while bench.replica.rollouts < SEATS or any(s.fresh for s in bench.replica.engine.running):
            bench.step()
        pushed_at = bench.now
        bench.replica.push()
        steps = []
        while bench.replica.tally.cuts == 0:
            began = bench.now
            bench.step()
            steps.append(bench.now - began)
        known, slow = model.step_s(SEATS), 1.5 * model.step_s(SEATS)
        assert steps[0] == pytest.approx(known)  # had begun
        assert steps[1:] == pytest.approx([slow] * (len(steps) - 1))
        assert pushed_at + 1.0 <= bench.now <= pushed_at + 1.0 + slow
        began = bench.now
        bench.step()
        assert bench.now == pytest.approx(began + 0.25)

    asyncio.run(inside())


def test_weights_that_come_while_others_arrive_go_in_after_those() -> None:
    async def inside() -> None:
        model = MODEL.model_copy(update={"arrive_s": 2.0, "pause_s": 0.25})
        bench = Bench(replace(scene(guard=False), model=model, training=TRAINING))
        bench.replica.look()
        seen: list[int] = []
        for number in range(7):  # one a second
            bench.work.version = number + 1
            bench.replica.push()
            until = bench.now + 1.0
            while bench.now < until:
                bench.step()
            seen.append(bench.replica._version)
        assert seen[0] == 0
        assert seen[2] == 1
        assert seen[-1] > 1
        assert seen == sorted(seen)

    asyncio.run(inside())


def test_a_step_with_a_token_for_each_sequence_computes_no_prompt() -> None:
    engine = Engine(MODEL, most_tokens=3, room=StepRoom(), seed=0)
    decoding = [Sequence(10, 5, 0, user=False) for _ in range(3)]
    late = Sequence(20, 5, 20, user=True)
    engine.running = [*decoding, late]
    engine.begin(0.0)
    got, _ = engine.end()
    assert set(got) == set(decoding)
    assert late.fresh == 20


def test_more_users_than_the_gateway_takes_are_refused_and_so_outside() -> None:
    options = FleetOptions.model_validate(
        {"engine": {"max_num_seqs": SEATS}, "gateway": {"limits": {"max_user_requests": 12}}}
    )
    one = replace(scene(guard=False), options=options)
    story = told(one, 200.0, seconds=20.0)
    assert story.parts.users.sum() == pytest.approx(200 * 20, rel=0.1)
    assert story.parts.held.max() <= 12
    assert story.parts.refused.sum() > 0.6 * story.parts.users.sum()
    assert story.parts.attainment is not None
    assert story.parts.attainment < 0.3


def test_steps_that_pushes_make_longer_cost_tokens() -> None:
    def harvest(slowness: float) -> float:
        model = MODEL.model_copy(update={"arrive_s": 2.0, "arrive_slowness": slowness})
        return told(replace(scene(), model=model), 2.0, seconds=120.0).parts.harvest_s

    assert 0.5 < harvest(1.6) / harvest(1.0) < 1.0


def test_without_users_rollouts_have_every_seat() -> None:
    story = told(scene(guard=False), 0.0)
    assert story.parts.rollouts.mean() > 0.97 * SEATS
    assert story.parts.attainment is None
    most = SEATS / MODEL.step_s(SEATS)
    assert 0.6 * most < story.parts.harvest_s < 1.1 * most


@pytest.mark.parametrize("guard", [False, True])
def test_more_users_never_mean_more_harvest(guard: bool) -> None:
    harvests = [told(scene(guard=guard), rate, seconds=120.0).parts.harvest_s for rate in (0.0, 1.0, 3.0, 6.0)]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(harvests))


def test_no_rollout_runs_where_none_may() -> None:
    story = told(scene(guard=False, max_seats=0), 2.0)
    assert story.parts.rollout_tokens.sum() == 0
    assert story.parts.users.sum() > 0


def test_the_guard_keeps_more_users_inside_than_rollouts_in_every_seat() -> None:
    tight = SloConfig(ttft_s=0.2, tpot_s=0.033)
    guarded = scene()
    guarded = replace(guarded, promise=tight, options=guarded.options.model_copy(update={"slo": tight}))
    unguarded = replace(scene(guard=False, preempt=False), promise=tight)
    with_guard, without = told(guarded, 2.0).parts.attainment, told(unguarded, 2.0).parts.attainment
    assert with_guard is not None
    assert without is not None
    assert with_guard > without + 0.2


def test_the_same_seed_tells_the_same_story_and_another_one_another() -> None:
    first, again, other = (told(scene(seed=seed), 2.0) for seed in (1, 1, 2))
    assert first.ttft_s == again.ttft_s
    assert first.parts.rollout_tokens.tolist() == again.parts.rollout_tokens.tolist()
    assert first.ttft_s != other.ttft_s


def test_the_training_gate_bounds_what_is_in_flight() -> None:
    story = told(replace(scene(), training=TRAINING), 0.5, seconds=120.0)
    assert story.trained > 0
    assert story.trained % TRAINING.batch_groups == 0
    assert story.pushes == story.trained / TRAINING.batch_groups
    assert story.stale == 0  # eta is below max_age


def test_the_ledger_of_groups_adds_up() -> None:
    async def inside() -> None:
        work = Work(MODEL.work, TRAINING, seed=0)
        tasks = [task for _ in range(10) if (task := work.lease()) is not None]
        assert len(tasks) == TRAINING.credits
        for task in tasks[:3]:
            work.complete(task)
        work.give_back(tasks[3])
        assert work.begin_step() == TRAINING.step_s
        work.end_step()
        assert work.lease() is tasks[3]
        ledger = work.ledger
        assert ledger.accepted == ledger.trained + ledger.stale + ledger.delivered + work.in_flight

    asyncio.run(inside())


def test_groups_of_versions_too_old_are_dropped_as_the_trainer_drops_them() -> None:
    work = Work(MODEL.work, replace(TRAINING, staleness=StalenessConfig(eta=1, max_age=0)), seed=0)
    tasks = [task for _ in range(4) if (task := work.lease()) is not None]
    for task in tasks:
        for sample in task.samples:
            sample.version = 0
    for task in tasks[:2]:
        work.complete(task)
    assert work.begin_step() is not None
    work.end_step()
    for task in tasks[2:]:
        work.complete(task)
    assert work.begin_step() is None
    assert work.ledger.stale == 2


def test_a_promise_that_the_idle_engine_cannot_keep_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"tpot_s=0.01 cannot be met: the idle engine needs 0.02"):
        replace(scene(), promise=SloConfig(tpot_s=0.01)).check()
    with pytest.raises(ConfigError, match="both missing"):
        replace(scene(), promise=SloConfig()).check()


def test_rollouts_beyond_the_room_of_a_step_sit_it_out_beside_users() -> None:
    room = StepRoom()
    room.set(limit=4.0, weight=2.0)
    engine = Engine(MODEL, most_tokens=64, room=room, seed=0)
    rollouts, user = [Sequence(10, 5, 0, user=False) for _ in range(4)], Sequence(10, 1, 0, user=True)
    engine.running = [*rollouts, user]
    engine.begin(0.0)
    assert set(engine.end()[0]) == {*rollouts[:2], user}, "the oldest have the room"
    engine.running = rollouts
    engine.begin(1.0)
    assert set(engine.end()[0]) == set(rollouts)
