"""The notice board of a run without a fleet: it keeps what its one writer says, in this process, and nobody reads it.

Tokens are not checked, because the lock on the run's directory keeps other writers out.
"""

from dataclasses import replace

from rollout.board import CurrentVersion, Heartbeat, Invitation, Kept, Membership, Pin
from rollout.errors import Fenced


class LocalBoard:
    """See `board.Board`."""

    def __init__(self) -> None:
        self._attached: dict[str, str] = {}
        self._kept: dict[str, Kept] = {}
        self._runs: dict[str, set[str]] = {}
        self._reserved: dict[str, int] = {}
        self._current: dict[str, CurrentVersion] = {}
        self._beats: dict[str, dict[str, Heartbeat]] = {}
        self._pins: dict[str, Pin] = {}
        self._invitations: dict[str, Invitation] = {}
        self._acks: dict[tuple[str, int], dict[str, str]] = {}
        self._members: dict[tuple[str, int], Membership] = {}

    async def attach(self, fleet: str, run: str, token: int) -> None:  # noqa: ARG002
        self._attached[fleet] = run

    async def detach(self, fleet: str, run: str, token: int) -> None:  # noqa: ARG002
        if self._attached.get(fleet) == run:
            del self._attached[fleet]

    async def keep(self, fleet: str, kept: Kept, *, ttl_s: float) -> None:  # noqa: ARG002
        self._kept[fleet] = kept

    async def kept(self, fleet: str) -> Kept | None:
        return self._kept.get(fleet)

    async def attached_run(self, fleet: str) -> str | None:
        return self._attached.get(fleet)

    async def register_run(self, fleet: str, run: str) -> None:
        self._runs.setdefault(fleet, set()).add(run)

    async def runs(self, fleet: str) -> list[str]:
        return sorted(self._runs.get(fleet, ()))

    async def reserve_version(self, run: str, token: int, *, at_least: int) -> int:  # noqa: ARG002
        """The numbers of earlier sessions are known to the caller by their artefacts and checkpoints."""
        self._reserved[run] = max(self._reserved.get(run, 0) + 1, at_least)
        return self._reserved[run]

    async def set_current(self, run: str, token: int, current: CurrentVersion) -> None:  # noqa: ARG002
        known = self._current.get(run)
        if known is not None and current.version <= known.version:
            raise Fenced(f"run {run}: version {current.version} is not larger than {known.version}")
        self._current[run] = current

    async def current(self, run: str) -> CurrentVersion | None:
        return self._current.get(run)

    async def heartbeat(self, fleet: str, beat: Heartbeat, *, ttl_s: float) -> None:  # noqa: ARG002
        self._beats.setdefault(fleet, {})[beat.replica] = beat

    async def retire(self, fleet: str, replica: str) -> None:
        self._beats.get(fleet, {}).pop(replica, None)

    async def replicas(self, fleet: str) -> list[Heartbeat]:
        return sorted(self._beats.get(fleet, {}).values(), key=lambda beat: (beat.started_at, beat.replica))

    async def seen_replicas(self, fleet: str) -> int:
        return len(self._beats.get(fleet, {}))

    async def pin(self, fleet: str, pin: Pin, *, ttl_s: float) -> None:  # noqa: ARG002
        self._pins[fleet] = pin

    async def unpin(self, fleet: str, run: str, token: int) -> None:  # noqa: ARG002
        if (pin := self._pins.get(fleet)) is not None and pin.run == run:
            del self._pins[fleet]

    async def pinned(self, fleet: str) -> Pin | None:
        return self._pins.get(fleet)

    async def open_epoch(self, fleet: str, invitation: Invitation) -> int:
        known = self._invitations.get(fleet)
        epoch = 1 if known is None else known.epoch + 1
        self._invitations[fleet] = replace(invitation, epoch=epoch)
        return epoch

    async def invitation(self, fleet: str) -> Invitation | None:
        return self._invitations.get(fleet)

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None:
        self._acks.setdefault((fleet, epoch), {})[replica] = host

    async def acks(self, fleet: str, epoch: int) -> dict[str, str]:
        return dict(self._acks.get((fleet, epoch), {}))

    async def freeze(self, fleet: str, token: int, membership: Membership) -> None:  # noqa: ARG002
        self._members[fleet, membership.epoch] = membership

    async def membership(self, fleet: str, epoch: int) -> Membership | None:
        return self._members.get((fleet, epoch))
