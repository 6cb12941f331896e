"""Wishes on Redis; what each method promises: `wishes.Wishes`. Keys beside the board's, in the fleet's slot."""

import json

from rollout.errors import Fenced
from rollout.redis_store import RedisStore, ScriptRefusal
from rollout.wishes import Wish


class RedisWishes:
    """See `wishes.Wishes`."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def lead(self, fleet: str, holder: str, *, ttl_s: float) -> int | None:
        epoch = await self._store.script("lender_lead", self._key(fleet, "lender"), holder, _ms(ttl_s))
        return int(epoch) or None

    async def wish(self, fleet: str, wish: Wish, *, ttl_s: float) -> None:
        record = {"epoch": wish.epoch, "lent": sorted(wish.lent), "decided_at": dict(wish.decided_at)}
        args = (wish.epoch, json.dumps(record, sort_keys=True), _ms(ttl_s))
        try:
            await self._store.script("lender_wish", self._key(fleet, "lender"), *args)
        except ScriptRefusal as refusal:
            raise Fenced(f"fleet {fleet}: {refusal.detail}") from None

    async def wished(self, fleet: str) -> Wish | None:
        raw = await self._store.command("GET", self._key(fleet, "wish"))
        if raw is None:
            return None
        record = json.loads(raw)
        return Wish(record["epoch"], frozenset(record["lent"]), record["decided_at"])

    def _key(self, fleet: str, name: str) -> str:
        return f"{self._store.config.namespace}:{{{fleet}}}:fleet:{name}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
