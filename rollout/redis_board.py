"""The notice board on Redis; what each method promises: `board.Board`.

Keys of a run share its slot with those of its queue; those of a fleet (`<ns>:{<fleet>}:fleet:...`) have their own. What
concerns both is checked in the run's slot first and then written in the fleet's; replicas check token and epoch again.
What may grow the server's memory is written by a script, which is let through at maxmemory too.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rollout.board import (
    AppliedPush,
    CurrentVersion,
    Heartbeat,
    Invitation,
    Kept,
    Membership,
    Pin,
    PushPath,
    ReplicaRole,
    ReplicaState,
    RoleSwitch,
)
from rollout.errors import Fenced, WriterBusy
from rollout.redis_store import Argument, RedisStore, ScriptRefusal

_EPOCH_TTL_S = 3_600
_BEAT_FIELDS = frozenset(field.name for field in dataclasses.fields(Heartbeat))


class RedisBoard:
    """See `board.Board`."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    # runs and versions

    async def attach(self, fleet: str, run: str, token: int) -> None:
        await self._run_script("check_writer", run, token)
        seen = await self.attached_run(fleet)
        if seen not in {None, run} and await self._run_script("writer_alive", str(seen)):
            raise WriterBusy(f"fleet {fleet} follows run {seen}, whose writer is alive")
        if not await self._fleet_script("board_attach", fleet, "attached", seen or "", run):
            raise WriterBusy(f"fleet {fleet} was attached to another run at the same moment")

    async def detach(self, fleet: str, run: str, token: int) -> None:
        await self._run_script("check_writer", run, token)
        await self._fleet_script("board_attach", fleet, "attached", run, "")

    async def keep(self, fleet: str, kept: Kept, *, ttl_s: float) -> None:
        await self._fleet_script("board_put", fleet, "kept", _json(kept), _ms(ttl_s))

    async def kept(self, fleet: str) -> Kept | None:
        raw = await self._store.command("GET", self._fleet_key(fleet, "kept"))
        if raw is None:
            return None
        kept = json.loads(raw)
        return Kept(**{**kept, "current": CurrentVersion(**kept["current"])})

    async def attached_run(self, fleet: str) -> str | None:
        run = await self._store.command("GET", self._fleet_key(fleet, "attached"))
        return None if run is None else str(run.decode())

    async def register_run(self, fleet: str, run: str) -> None:
        await self._fleet_script("board_register", fleet, "runs", run)

    async def runs(self, fleet: str) -> list[str]:
        return sorted(r.decode() for r in await self._store.command("SMEMBERS", self._fleet_key(fleet, "runs")))

    async def reserve_version(self, run: str, token: int, *, at_least: int) -> int:
        return int(await self._run_script("reserve_version", run, token, at_least))

    async def set_current(self, run: str, token: int, current: CurrentVersion) -> None:
        await self._run_script("set_current", run, token, current.version, _json(current))

    async def current(self, run: str) -> CurrentVersion | None:
        raw = await self._store.command("HGET", self._run_key(run, "weights"), "current")
        return None if raw is None else CurrentVersion(**json.loads(raw))

    # replicas

    async def heartbeat(self, fleet: str, beat: Heartbeat, *, ttl_s: float) -> None:
        args = (beat.replica, _json(beat), _ms(ttl_s), int(beat.answers))
        await self._fleet_script("board_beat", fleet, "beats", *args)

    async def retire(self, fleet: str, replica: str) -> None:
        await self._fleet_script("board_retire", fleet, "beats", replica)

    async def replicas(self, fleet: str) -> list[Heartbeat]:
        beats = [_heartbeat(json.loads(raw)) for raw in await self._fleet_script("board_replicas", fleet, "beats")]
        return sorted(beats, key=lambda beat: (beat.started_at, beat.replica))

    async def seen_replicas(self, fleet: str) -> int:
        return int(await self._store.command("SCARD", self._fleet_key(fleet, "seen")))

    # evaluations

    async def pin(self, fleet: str, pin: Pin, *, ttl_s: float) -> None:
        await self._run_script("check_writer", pin.run, pin.fencing_token)
        await self._fleet_script("board_put", fleet, "pin", _json(pin), _ms(ttl_s))

    async def unpin(self, fleet: str, run: str, token: int) -> None:
        await self._run_script("check_writer", run, token)
        pin = await self.pinned(fleet)
        if pin is not None and pin.run == run:
            await self._store.command("DEL", self._fleet_key(fleet, "pin"))

    async def pinned(self, fleet: str) -> Pin | None:
        raw = await self._store.command("GET", self._fleet_key(fleet, "pin"))
        return None if raw is None else Pin(**json.loads(raw))

    # epochs

    async def open_epoch(self, fleet: str, invitation: Invitation) -> int:
        await self._run_script("check_writer", invitation.run, invitation.fencing_token)
        attached = await self.attached_run(fleet)
        if attached != invitation.run:
            raise Fenced(f"fleet {fleet} follows run {attached or 'none'}, not {invitation.run}")
        args = (invitation.run, invitation.fencing_token, round(invitation.deadline_s * 1000), _json(invitation))
        return int(await self._fleet_script("board_open", fleet, "epoch", *args))

    async def invitation(self, fleet: str) -> Invitation | None:
        answer = await self._fleet_script("board_invitation", fleet, "epoch")
        if answer is None:
            return None
        number, raw = answer
        return dataclasses.replace(Invitation(**json.loads(raw)), epoch=number)

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None:
        await self._fleet_script("board_ack", fleet, "epoch", epoch, replica, host, _EPOCH_TTL_S)

    async def acks(self, fleet: str, epoch: int) -> dict[str, str]:
        raw = await self._store.command("HGETALL", self._fleet_key(fleet, f"acks:{epoch}"))
        return {replica.decode(): host.decode() for replica, host in raw.items()}

    async def freeze(self, fleet: str, token: int, membership: Membership) -> None:
        args = (token, membership.epoch, _json(membership), _EPOCH_TTL_S)
        await self._fleet_script("board_freeze", fleet, "epoch", *args)

    async def membership(self, fleet: str, epoch: int) -> Membership | None:
        raw = await self._store.command("GET", self._fleet_key(fleet, f"members:{epoch}"))
        return None if raw is None else Membership(**json.loads(raw))

    # details

    def _run_key(self, run: str, name: str) -> str:
        return f"{self._store.config.namespace}:{{{run}}}:{name}"

    def _fleet_key(self, fleet: str, name: str) -> str:
        return f"{self._store.config.namespace}:{{{fleet}}}:fleet:{name}"

    async def _run_script(self, name: str, run: str, *args: Argument) -> Any:
        return await self._fencing(name, self._run_key(run, "ledger"), args)

    async def _fleet_script(self, name: str, fleet: str, key: str, *args: Argument) -> Any:
        return await self._fencing(name, self._fleet_key(fleet, key), args)

    async def _fencing(self, name: str, key: str, args: Sequence[Argument]) -> Any:
        try:
            return await self._store.script(name, key, *args)
        except ScriptRefusal as refusal:
            raise Fenced(f"{key.rsplit(':', 1)[0]}: {refusal.detail}") from None


def _json(record: CurrentVersion | Heartbeat | Invitation | Kept | Membership | Pin) -> str:
    return json.dumps(dataclasses.asdict(record), sort_keys=True)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _heartbeat(raw: dict[str, Any]) -> Heartbeat:
    pushes = tuple(AppliedPush(**{**push, "path": PushPath(push["path"])}) for push in raw["pushes"])
    switches = tuple(RoleSwitch(**{**one, "to": ReplicaRole(one["to"])}) for one in raw.get("switches", ()))
    role = ReplicaRole(raw["role"]) if raw.get("role") else None
    raw = {name: value for name, value in raw.items() if name in _BEAT_FIELDS}  # a newer replica may say more
    typed = {
        "state": ReplicaState(raw["state"]),
        "pushes": pushes,
        "role": role,
        "switches": switches,
        "adapter_layers": tuple(raw.get("adapter_layers", ())),
        "push_felt_counts": tuple(raw.get("push_felt_counts", ())),
    }
    return Heartbeat(**{**raw, **typed})
