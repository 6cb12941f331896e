"""Users of an engine who wait for their first token."""

import asyncio
from contextlib import suppress

from services.watched import Watched

FIRST_TOKENS_S = 1.0
"""After new weights, for users who waited for them. One with a longer prompt shares its steps with rollouts again."""
_LOOK_S = 0.005


async def first_tokens(engine: Watched, since: float) -> None:
    """Returns when users who came before `since` have theirs, and after a second."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_TOKENS_S):
            while _without_token(engine, since):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(_LOOK_S)


def _without_token(engine: Watched, since: float) -> bool:
    return any(user.first is None and user.arrived <= since for user in engine.users().values())
