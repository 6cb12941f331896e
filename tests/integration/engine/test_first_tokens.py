"""A user who finds an engine full of rollouts shares no step with them until the first token is there."""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs import tokens_input

from rollout.types import Partial, Sampling
from services.priorities import CANARY, ROLLOUT, USER
from services.rehearsal import independent_logprobs
from services.step_log import StepLog
from services.swap import WeightSwap
from services.users_first import _UsersFirst
from tests.engine_rig import SEATS, Rig

pytestmark = pytest.mark.timeout(600)
PROMPT = (72, 73, 74)


class Steps(StepLog):
    """Tokens of prompts and of answers, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        if iteration_stats is not None:
            self.seen.append((iteration_stats.num_prompt_tokens, iteration_stats.num_generation_tokens))


@contextmanager
def watched(rig: Rig) -> Iterator[Steps]:
    loggers, steps = rig.client.logger_manager.stat_loggers, Steps()
    loggers.append(steps)
    try:
        yield steps
    finally:
        loggers.remove(steps)


async def user(rig: Rig, number: int, *, tokens: int = 1) -> None:
    prompt = tokens_input([1 + number // 100, number % 100, *range(40, 100)])
    async for _ in rig.client.generate(prompt, SamplingParams(max_tokens=tokens), f"user-{number}"):
        pass


async def rollouts(rig: Rig, count: int, tokens: int, *, give_way: bool = True) -> list[asyncio.Task[Partial | None]]:
    """Each with a few tokens, of the model that the rig was built with whatever another test has pushed."""
    await WeightSwap(rig.engine, watchdog_s=30).load(rig.model, version=0)
    rig.engine.rollouts_give_way = give_way  # whatever a replica has measured on this engine
    generations = [rig.engine.begin((*PROMPT, i), Sampling(max_tokens=tokens), seed=i) for i in range(count)]
    running = [asyncio.create_task(generation.ended()) for generation in generations]
    while min(generation.size for generation in generations) < 5:  # noqa: ASYNC110  the engine tells nobody
        await asyncio.sleep(0.005)
    return running


def lost_nothing(rig: Rig, parts: Sequence[Partial | None], tokens: int) -> None:
    """All have so many tokens or an end, with the model's own logprobs."""
    for i, part in enumerate(parts):
        assert part is not None
        assert len(part.token_ids) == tokens or part.finished
        expected = independent_logprobs(rig.model, ((*PROMPT, i, *part.token_ids),))[0][len(PROMPT) :]
        assert part.logprobs == pytest.approx(expected, abs=1e-3)


@contextmanager
def room(rig: Rig, limit: float, weight: float) -> Iterator[None]:
    """Of its steps, for rollouts and users."""
    rig.engine.step_room.set(limit, weight)
    try:
        yield
    finally:
        rig.engine.step_room.set(limit=math.inf, weight=1.0)


async def test_the_step_that_computes_a_users_prompt_is_without_rollouts_which_lose_nothing_by_it(rig: Rig) -> None:
    running = await rollouts(rig, SEATS - 1, 120)
    with watched(rig) as steps:
        for number in range(5):
            await user(rig, number)
    parts = [await task for task in running]
    assert [answers for prompts, answers in steps.seen if prompts] == [1] * 5
    assert [answers for prompts, answers in steps.seen if not prompts and answers >= SEATS - 1]
    lost_nothing(rig, parts, 120)


async def test_rollouts_go_on_where_somebody_always_waits_for_a_first_token(rig: Rig) -> None:
    running = await rollouts(rig, 3, 40)
    number, over = 100, asyncio.gather(*running)
    while not over.done():
        await asyncio.wait({asyncio.create_task(user(rig, number + i)) for i in range(4)})
        number += 4
    assert all(part is not None and part.finished for part in await over)
    assert number < 100 + 40 * 4 * 8


async def test_users_who_find_no_seat_do_not_keep_rollouts_from_ending(rig: Rig) -> None:
    """Nobody is asked for a seat here, as with `harvest.preempt` off."""
    running = await rollouts(rig, SEATS, 60)
    async with asyncio.timeout(120):
        await user(rig, 999, tokens=4)
        assert all(part is not None for part in await asyncio.gather(*running))


async def test_rollouts_that_cost_users_nothing_are_in_every_step(rig: Rig) -> None:
    running = await rollouts(rig, 4, 60, give_way=False)
    with watched(rig) as steps:
        await user(rig, 2000)
    await asyncio.gather(*running)
    assert [answers for prompts, answers in steps.seen if prompts] == [5]


async def test_an_engine_tells_of_answers_that_ended_between_two_looks_and_of_none_of_its_own(rig: Rig) -> None:
    engine = rig.engine
    engine.step_log.ended.take()
    await engine.begin(PROMPT, Sampling(max_tokens=3), seed=None).ended()
    began = time.monotonic()
    for tokens in (1, 9):
        await user(rig, 700 + tokens, tokens=tokens)
    took = time.monotonic() - began
    ended = engine.step_log.ended.take()
    assert [(times.request, times.tokens) for times in ended] == [("user-701", 1), ("user-709", 9)]
    for times in ended:
        assert times.prompt == 62, "none of it was cached"
        assert times.ttft_s is not None
        assert 0 < times.ttft_s < took
        assert engine.times(times.request) == [times]
    assert ended[0].tpot_s is None
    assert 0 < (ended[1].tpot_s or 0) < took / 8


async def test_rollouts_beyond_the_room_of_a_step_sit_it_out_beside_users_and_lose_nothing_by_it(rig: Rig) -> None:
    running = await rollouts(rig, SEATS - 1, 100)
    with room(rig, limit=4.0, weight=2.0), watched(rig) as steps:
        await user(rig, 800, tokens=30)
    parts = [await task for task in running]
    answers = [answers for prompts, answers in steps.seen if not prompts]
    assert answers.count(3) > 20, "the user and two rollouts"
    lost_nothing(rig, parts, 100)


async def test_users_who_fill_the_room_of_a_step_leave_rollouts_none(rig: Rig) -> None:
    running = await rollouts(rig, 4, 80)
    with room(rig, limit=6.0, weight=2.0), watched(rig) as steps:
        await asyncio.gather(*(user(rig, 2010 + number, tokens=20) for number in range(3)))
    await asyncio.gather(*running)
    answers = [answers for prompts, answers in steps.seen if not prompts]
    assert answers.count(3) > 5, "three users: two would have two rollouts beside them, and none four"


def request(priority: int, status: str = "waiting") -> SimpleNamespace:
    computed = 8 if status == "running" else 0
    name = f"{priority} {status}"
    return SimpleNamespace(
        priority=priority, status=status, request_id=name, num_computed_tokens=computed, num_prompt_tokens=8
    )


def scheduler(seats: int, *waiting: SimpleNamespace) -> Any:
    """With a user and a rollout that run."""
    found = SimpleNamespace(
        running=[request(USER, "running"), request(ROLLOUT, "running")],
        waiting=waiting,
        max_num_active_reqs=seats,
        _is_blocked_waiting_status=lambda status: status == "blocked",
    )
    found._beginnable = partial(_UsersFirst._beginnable, found)
    return found


def test_users_who_wait_count_as_far_as_they_can_be_begun() -> None:
    def users(seats: int, *waiting: SimpleNamespace) -> int:
        return _UsersFirst._users(scheduler(seats, *waiting))

    three = (request(CANARY), request(USER), request(USER), request(ROLLOUT))
    assert [users(seats, *three) for seats in (2, 3, 4, 9)] == [1, 2, 3, 4]
    assert users(9) == 1
    assert users(9, request(USER, "blocked"), request(USER)) == 2


def test_a_user_whose_grammar_is_not_ready_keeps_no_rollout_from_a_step() -> None:
    def awaited(seats: int, *waiting: SimpleNamespace) -> set[str]:
        return _UsersFirst._awaited(scheduler(seats, *waiting))

    blocked, ready = request(USER, "blocked"), request(USER)
    assert [awaited(9, *waiting) for waiting in ((), (blocked,), (blocked, ready))] == [
        set(),
        set(),
        {ready.request_id},
    ]
    assert awaited(2, ready) == set(), "there is no seat"
    assert awaited(9, request(ROLLOUT), ready) == set(), "who comes first is first"


async def test_rollouts_that_do_not_give_way_to_prompts_keep_to_the_room_of_a_step_too(rig: Rig) -> None:
    running = await rollouts(rig, 4, 60, give_way=False)
    with room(rig, limit=3.0, weight=1.0), watched(rig) as steps:
        await user(rig, 2001, tokens=8)
    await asyncio.gather(*running)
    assert [answers for prompts, answers in steps.seen if prompts] == [3], "the user and two rollouts"


async def test_users_who_wait_for_a_seat_take_none_of_the_room_of_a_step(rig: Rig) -> None:
    """Nobody is asked for a seat here either, and beside a user there is no room for rollouts."""
    running = await rollouts(rig, SEATS, 60)
    with room(rig, limit=1.0, weight=2.0):
        async with asyncio.timeout(120):
            await user(rig, 998, tokens=4)
            assert all(part is not None for part in await asyncio.gather(*running))
