"""The door by which users' requests reach a replica: who may come in, and what is kept of those who did."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rollout.board import ReplicaRole
from services.engine_faults import faults_reported
from services.role_router import NotServing
from services.user_load import Answer
from services.way import marked

Begin = Callable[[], Awaitable[AsyncGenerator[Any, None]]]
"""Hands a request to the engine."""


class House(Protocol):
    """What the door asks of its replica, and tells it."""

    @property
    def role(self) -> ReplicaRole | None: ...

    @property
    def takes_users(self) -> bool: ...

    @property
    def ended(self) -> str:
        """Why no request will be answered any more; empty while they are."""
        ...

    def request(self, sequences: int) -> AbstractContextManager[Answer]:
        """A user's request, from its arrival to its end."""
        ...

    def answered(self) -> None:
        """A user has an item of an answer."""
        ...

    def failed(self) -> None:
        """The engine failed a user's request."""
        ...


async def admitted(
    house: House, begin: Begin, seats: int, *, name: str, first_token_s: Callable[[], float | None] = lambda: None
) -> AsyncGenerator[Any, None]:
    """The request's own stream; it holds as many of the users' seats until it ends or is given up. `name` is Serve's of
    the replica. Its first item says what `first_token_s` does of the engine, see `way`.

    Raises NotServing before its first item, and before the engine has heard of it, in another role or where the engine
    is dead: the gateway tries another replica, and the router learns of both only later.
    """
    if house.ended:
        raise NotServing(name, house.ended)
    if not house.takes_users:
        raise NotServing(name, str(house.role))
    # no await between the look at the role and the seats: a replica that nobody holds a seat of is drained
    begun = False
    with house.request(seats) as answer:
        async for item in faults_reported(await begin(), house.failed):
            house.answered()
            answer.got(item)
            yield item if begun else marked(item, first_token_s())
            begun = True
        answer.finished = True
