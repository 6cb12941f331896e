"""The door by which users' requests reach a replica: who may come in, and what is kept of those who did."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rollout.board import ReplicaRole
from services.engine_faults import faults_reported, is_fault
from services.role_router import NotServing
from services.stream_marks import begun, ended, is_last
from services.user_load import Answer
from services.user_window import RequestTimes

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

    def answered(self, first_at: float) -> None:
        """A user's request got its first token then, monotonic seconds."""
        ...

    def failed(self) -> None:
        """The engine failed a user's request."""
        ...


async def admitted(
    house: House, begin: Begin, seats: int, *, name: str, times: Callable[[], Sequence[RequestTimes]] = tuple
) -> AsyncGenerator[Any, None]:
    """The request's own stream; it holds as many of the users' seats until it ends or is given up. `name` is Serve's of
    the replica. It is marked with what the engine says of the `times` of the request's sequences.

    Raises NotServing before its first item, and before the engine has heard of it, in another role or where the engine
    is dead: the gateway tries another replica, and the router learns of both only later.
    """
    if house.ended:
        raise NotServing(name, house.ended)
    if not house.takes_users:
        raise NotServing(name, str(house.role))
    # no await between the look at the role and the seats: a replica that nobody holds a seat of is drained
    first = True
    with house.request(seats) as answer:
        async for item in faults_reported(await begin(), house.failed):
            answer.got(item)
            marked = _begun(house, item, times()) if first else item
            if is_last(item) and (tokens := [sequence.tokens for sequence in times()]):
                answer.tokens = sum(tokens)
                marked = ended(marked, max(tokens))
            yield marked
            first = False
        answer.finished = True


def _begun(house: House, item: Any, times: Sequence[RequestTimes]) -> Any:
    """The first item, marked; an answer that does not stream is of one item, long after its first token."""
    answered = [one for one in times if one.first is not None]
    if answered and not is_fault(item):
        house.answered(min(one.first for one in answered if one.first is not None))
    return begun(item, min((one.ttft_s for one in answered if one.ttft_s is not None), default=None))
