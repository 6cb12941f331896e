"""Turns of a fleet's replicas on Redis, by the server's clock. Keys beside the board's, in the fleet's slot."""

from rollout.redis_store import RedisStore


class RedisTurns:
    """Who may stand still for new weights now. Both raise StoreUnavailable when the server does not answer."""

    def __init__(self, store: RedisStore, fleet: str) -> None:
        self._store = store
        self._key = f"{store.config.namespace}:{{{fleet}}}:fleet:turns"

    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool:
        """Whether it has a turn now, for `ttl_s`, until `end`, or until its heartbeats end: at most so large a share of
        the fleet's replicas that answer users have one, and at least one has."""
        return bool(await self._store.script("board_turn", self._key, replica, share, max(1, round(ttl_s * 1000))))

    async def end(self, replica: str) -> None:
        await self._store.command("ZREM", self._key, replica)
