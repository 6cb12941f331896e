"""The door by which users' requests reach a replica: who may come in, and what is kept of those who did."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from services.engine_faults import faults_reported
from services.fleet import Event
from services.replica import Replica
from services.role_router import NotServing

Begin = Callable[[], Awaitable[AsyncGenerator[Any, None]]]
"""Hands a request to the engine."""


async def admitted(replica: Replica, begin: Begin, seats: int, *, name: str) -> AsyncGenerator[Any, None]:
    """The request's own stream; it holds as many of the users' seats until it ends or is given up. `name` is Serve's of
    the replica.

    Raises before its first item, and before the engine has heard of it: NotServing in another role, with which the
    gateway tries another replica, and ReplicaUnhealthy. The router learns of both only later.
    """
    replica.check_engine()
    if not replica.takes_users:
        raise NotServing(name, str(replica.role))
    # no await between the look at the role and the seats: a replica without users is drained
    with replica.request(seats) as answer:
        async for item in faults_reported(await begin(), lambda: replica.health.meet(Event.FAILED)):
            if replica.roles is not None:
                replica.roles.log.first_token()
            answer.got(item)
            yield item
        answer.finished = True
