"""A user comes in or is turned away before the engine has heard of the request."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollout.board import ReplicaRole
from services.door import admitted
from services.role_router import NotServing
from services.stream_marks import DONE
from services.user_load import Answer
from services.user_seats import UserSeats
from services.user_window import RequestTimes

FAULT = 'data: {"error": {"code": 500}}\n\n'


@dataclass
class House:
    role: ReplicaRole | None = None
    dead: bool = False
    seats: UserSeats = field(default_factory=lambda: UserSeats(lambda: None))
    answers: list[Answer] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def takes_users(self) -> bool:
        return self.role in {None, ReplicaRole.SERVING}

    @property
    def ended(self) -> str:
        return "the engine died" if self.dead else ""

    @contextmanager
    def request(self, sequences: int) -> Iterator[Answer]:
        with self.seats.hold(sequences):
            self.answers.append(Answer())
            yield self.answers[-1]

    def answered(self, first_at: float) -> None:
        self.told.append(f"answered at {first_at}")

    def failed(self) -> None:
        self.told.append("failed")


class Engine:
    """It is asked when `begin` is called."""

    def __init__(self, *items: str) -> None:
        self.items, self.asked = items, 0

    async def begin(self) -> AsyncGenerator[Any, None]:
        self.asked += 1
        return self._stream()

    async def _stream(self) -> AsyncGenerator[str, None]:
        for item in self.items:
            yield item


async def test_a_request_holds_its_seats_from_its_arrival_to_its_end() -> None:
    house, engine = House(ReplicaRole.SERVING), Engine("data: a\n\n", "data: b\n\n")
    stream = admitted(house, engine.begin, 3, name="x")
    assert (house.seats.held, await anext(stream), house.seats.held) == (0, "data: a\n\n", 3)
    assert [item async for item in stream] == ["data: b\n\n"]
    assert (house.seats.held, house.answers, house.told) == (0, [Answer(2, finished=True)], [])


async def test_an_event_stream_says_what_the_engine_took_and_how_many_tokens_it_has() -> None:
    house, engine = House(), Engine(["data: a\n\n"], ["data: b\n\n", DONE])  # type: ignore[arg-type]
    times = [RequestTimes(1.0, 1.25, 2.0, 5), RequestTimes(1.0, 1.5, 2.5, 7), RequestTimes(1.0, None, None, 0)]
    stream = admitted(house, engine.begin, 3, name="x", times=lambda: times)
    assert [item async for item in stream] == [
        [": engine 0.2500\n\n", "data: a\n\n"],
        ["data: b\n\n", ": tokens 7\n\n", DONE],
    ]
    assert house.answers == [Answer(12, finished=True)], "not its events"


async def test_a_user_has_a_first_token_when_the_engine_says_so_and_not_with_the_first_item() -> None:
    house, engine = House(), Engine("a whole answer, ten seconds later", "data: b\n\n")
    times = [RequestTimes(1.0, 1.5, 11.0, 7), RequestTimes(1.0, 1.25, 11.0, 5), RequestTimes(1.0, None, None, 0)]
    assert len([item async for item in admitted(house, engine.begin, 1, name="x", times=lambda: times)]) == 2
    assert house.told == ["answered at 1.25"]


async def test_who_leaves_early_gives_the_seats_back_and_is_no_failure() -> None:
    house, engine = House(), Engine("data: a\n\n", "data: b\n\n")
    stream = admitted(house, engine.begin, 1, name="x")
    await anext(stream)
    await stream.aclose()
    assert (house.seats.held, house.answers, house.told) == (0, [Answer(1)], [])


@pytest.mark.parametrize("role", [ReplicaRole.DRAINING, ReplicaRole.ROLLOUT, ReplicaRole.RECLAIMING])
async def test_a_replica_of_another_role_asks_its_engine_nothing_and_says_who_it_is(role: ReplicaRole) -> None:
    house, engine = House(role), Engine("data: a\n\n")
    with pytest.raises(NotServing, match=role.value) as refused:
        await anext(admitted(house, engine.begin, 1, name="serves-name"))
    assert (refused.value.replica, engine.asked, house.answers) == ("serves-name", 0, [])


async def test_a_dead_engine_is_asked_nothing_and_another_replica_may_be() -> None:
    house, engine = House(dead=True), Engine("data: a\n\n")
    with pytest.raises(NotServing, match="the engine died") as refused:
        await anext(admitted(house, engine.begin, 1, name="serves-name"))
    assert (refused.value.replica, engine.asked, house.answers) == ("serves-name", 0, [])


async def test_an_answer_that_the_engine_fails_is_told_once_and_is_no_first_token() -> None:
    house, engine = House(), Engine(FAULT)
    times = [RequestTimes(1.0, 1.25, 2.0, 5)]
    assert [item async for item in admitted(house, engine.begin, 1, name="x", times=lambda: times)] == [FAULT]
    assert house.told == ["failed"]
