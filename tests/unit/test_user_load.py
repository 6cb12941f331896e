import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.types import FinishReason, Partial, Sampling, VersionSpan
from services.adapters import Adapter
from services.idle_speed import IdleSpeed, measure
from services.user_load import ArrivalRate, Average, UserLoad, response_tokens

SPEED = IdleSpeed(first_token_s=0.1, token_s=0.02, capacity=8.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """A replica whose rollouts have made `rollouts` tokens, None while they make some."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rollouts: int | None = 0
        self.load = UserLoad(SPEED, window_s=30, others=lambda: self.rollouts, clock=self.clock)

    def answer(self, tokens: int, seconds: float, *, sequences: int = 1) -> None:
        with self.load.request(sequences) as answer:
            self.clock.now += seconds
            answer.got(SimpleNamespace(usage=SimpleNamespace(completion_tokens=tokens)))
            answer.finished = True


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_the_rate_counts_sequences_of_the_last_window_only() -> None:
    clock = Clock()
    rate = ArrivalRate(30, clock)
    for _ in range(90):
        rate.add(2)
        clock.now += 1
    assert rate.per_s == pytest.approx(2.0, rel=0.04)
    clock.now += 31
    assert rate.per_s == 0


def test_a_prior_is_outweighed_by_the_first_values_and_later_ones_are_forgotten() -> None:
    average = Average(128)
    for _ in range(40):
        average.add(10)
    assert average.value < 15
    for _ in range(200):
        average.add(50)
    assert average.value == pytest.approx(50, rel=0.01)


def test_before_any_request_the_service_time_is_the_probes(replica: Replica) -> None:
    assert replica.load.idle_service_s == pytest.approx(SPEED.service_s(128))
    assert replica.load.arrivals_per_s == 0


def test_requests_alone_on_the_engine_correct_the_probe(replica: Replica) -> None:
    for _ in range(200):
        replica.answer(51, 1.5 * SPEED.service_s(51))
    assert replica.load.idle_service_s == pytest.approx(1.5 * SPEED.service_s(51), rel=0.02)


def test_long_prompts_count_beside_rollouts_too_and_keep_the_engine_from_all_seats() -> None:
    speed = IdleSpeed(0.05, 0.02, 8.0, prefill_token_s=0.0005)
    load = UserLoad(speed, window_s=30, others=lambda: None, clock=Clock(), prompt=lambda: 2024.0)
    assert load.idle_service_s == pytest.approx(speed.service_s(128) + 8.0 * 1.0)


def test_what_prompts_were_expected_to_take_is_no_slowness() -> None:
    speed, clock = IdleSpeed(0.05, 0.02, 8.0, prefill_token_s=0.0005), Clock()
    load = UserLoad(speed, window_s=30, others=lambda: 0, clock=clock, prompt=lambda: 2024.0)
    for _ in range(200):
        with load.request(1) as answer:
            clock.now += speed.service_s(51) + 1.0
            answer.got(SimpleNamespace(usage=SimpleNamespace(completion_tokens=51)))
            answer.finished = True
    assert load.idle_service_s == pytest.approx(speed.busy_s(51, 2024), rel=0.02)


def test_requests_beside_rollouts_or_others_teach_lengths_but_no_speed(replica: Replica) -> None:
    replica.rollouts = None
    for _ in range(200):
        replica.answer(51, 10.0)
    replica.rollouts = 1
    with replica.load.request(1):
        for _ in range(200):
            replica.answer(51, 10.0)
    replica.answer(204, 10.0, sequences=4)
    assert replica.load.idle_service_s == pytest.approx(SPEED.service_s(51), rel=0.03)


def test_a_rollout_that_began_and_ended_in_between_is_noticed(replica: Replica) -> None:
    before = replica.load.idle_service_s
    with replica.load.request(1) as answer:
        replica.rollouts = 64
        replica.clock.now += 100
        answer.got(["data: {}\n\n"] * 128)
        answer.finished = True
    assert replica.load.idle_service_s == pytest.approx(before)


def test_a_request_that_its_client_gives_up_teaches_no_speed(replica: Replica) -> None:
    before = replica.load.idle_service_s
    with suppress(GeneratorExit), replica.load.request(1) as answer:
        answer.got(["data: {}\n\n"] * 128)
        replica.clock.now += 100
        raise GeneratorExit
    assert replica.load.idle_service_s == pytest.approx(before)


def test_an_errors_event_is_no_token() -> None:
    assert response_tokens('data: {"error": {"message": "no"}}\n\n') == 0
    assert response_tokens(SimpleNamespace(error="no")) == 0


class Machine:
    """An engine of 64 seats whose step takes 20 ms and 1 ms for each sequence in it, with a prefill of 50 ms and 1 ms
    for each prompt token beyond 24."""

    max_model_len = 128
    vocab_size = 100

    def __init__(self, ends_at_once: int = 0) -> None:
        """Every so manyth sequence has a single token."""
        self.clock = Clock()
        self.together = 0
        self.ends_at_once = ends_at_once
        self.prompts: list[tuple[int, ...]] = []
        self.adapters: set[Adapter | None] = set()

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, adapter: Adapter | None = None
    ) -> "Machine.Sequence":
        self.prompts.append(tuple(prompt_ids))
        self.adapters.add(adapter)
        self.together += 1
        ends = self.ends_at_once and len(self.prompts) % self.ends_at_once == 0
        return Machine.Sequence(self, len(prompt_ids), 1 if ends else sampling.max_tokens)

    class Sequence:
        size = reused = 0

        def __init__(self, machine: "Machine", prompt: int, tokens: int) -> None:
            self.machine, self.tokens = machine, tokens
            self.prefill_s = 0.05 + 0.001 * max(0, prompt - 24)

        async def ended(self) -> Partial | None:
            machine, together, began = self.machine, self.machine.together, self.machine.clock.now
            await asyncio.sleep(0)
            machine.clock.now = began + self.prefill_s + self.tokens * (0.02 + 0.001 * together)
            machine.together = 0
            ids = (1,) * self.tokens
            return Partial(ids, (-1.0,) * self.tokens, (VersionSpan(0, 0, self.tokens),), FinishReason.LENGTH)

        def so_far(self, start: int = 0) -> Partial | None:
            return None

        async def cut(self) -> None:
            pass


async def test_the_probe_finds_the_time_of_a_token_and_what_a_full_batch_is_worth() -> None:
    machine = Machine()
    speed = await measure(machine, 64, adapter=None, clock=machine.clock)
    assert speed.first_token_s == pytest.approx(0.071)
    assert speed.token_s == pytest.approx(0.021)
    assert speed.prefill_token_s == pytest.approx(0.001)
    alone_s, batch_s = 0.05 + 16 * 0.021, 0.05 + 16 * 0.084
    assert speed.capacity == pytest.approx(64 * alone_s / batch_s)
    assert len(set(machine.prompts)) == len(machine.prompts)


@pytest.mark.parametrize("ends_at_once", [2, 3, 5])
async def test_an_end_that_is_sampled_at_once_is_no_fast_engine(ends_at_once: int) -> None:
    machine = Machine(ends_at_once)
    speed = await measure(machine, 64, adapter=None, clock=machine.clock)
    assert speed.token_s == pytest.approx(0.021)
    assert speed.capacity > 8


async def test_where_every_sequence_ends_at_once_a_token_is_taken_to_be_no_faster_than_the_first() -> None:
    machine = Machine(ends_at_once=1)
    speed = await measure(machine, 8, adapter=None, clock=machine.clock)
    assert speed.token_s == speed.first_token_s > 0


async def test_the_probe_is_on_the_adapter_that_users_are_on() -> None:
    machine, adapter = Machine(), Adapter(1, version=0, directory=Path("production"))
    await measure(machine, 8, adapter=adapter, clock=machine.clock)
    assert machine.adapters == {adapter}
