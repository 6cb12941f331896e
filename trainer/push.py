"""Delivery of one version to the fleet: invite, freeze the members, broadcast, wait until they verified it.

A push never wedges: one deadline bounds it, and whoever is missing catches up from the artefact by its own loop.
"""

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog

from rollout.board import AppliedPush, Board, Heartbeat, Invitation, Membership, ReplicaState
from rollout.errors import Fenced, NightshiftError
from rollout.milestone import reached
from rollout.weights import WeightManifest
from trainer.config import PushConfig
from trainer.milestone import PushMilestone
from trainer.worker_group import WorkerGroup

log = structlog.get_logger(__name__)

_POLL_S = 0.01
_ABLE = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})


@dataclass(slots=True)
class PushReport:
    """What one push took."""

    version: int
    step: int
    epoch: int | None = None
    seconds: float = 0.0
    """From the pointer's move until every remaining replica verified it, or the deadline."""
    form_s: float | None = None
    send_s: float | None = None
    num_bytes: int = 0
    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per replica: path, receive_s, pause_s, canary_gap, verified."""
    missing: list[str] = field(default_factory=list)
    """Live at the start and not verified at the end."""
    error: str | None = None
    """Why the collective failed; replicas then took the artefact."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Invited:
    """Whom a push may reach, and how."""

    live: tuple[str, ...]
    epoch: int | None = None
    """None: by artefact alone."""
    error: str | None = None
    """Why there is no epoch although a collective was asked for."""


def unreachable(push_host: str, own_host: str, replica_hosts: Set[str]) -> str | None:
    """Why replicas on `replica_hosts` cannot reach `push_host`; None when nothing is known against it."""
    others = sorted(replica_hosts - {own_host})
    if not others or not _loopback(push_host):
        return None
    return f"push.host={push_host} is this machine alone, and replicas live on {', '.join(others)}; give its address"


def _cause(failure: NightshiftError) -> str:
    """In one line: the last of a worker's traceback, or that the worker died, without the end of its log."""
    lines = str(failure).strip().splitlines()
    return lines[0] if " died: " in lines[0] else lines[-1]


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def freeze_membership(epoch: int, acks: Mapping[str, str]) -> Membership:
    """Ranks 1.. for one receiver a host, in order of replica names; the other replicas of a host follow theirs."""
    receivers: dict[str, str] = {}
    followers: dict[str, str] = {}
    for replica in sorted(acks):
        host = acks[replica]
        if host in receivers:
            followers[replica] = receivers[host]
        else:
            receivers[host] = replica
    return Membership(epoch, {replica: rank for rank, replica in enumerate(receivers.values(), start=1)}, followers)


class Pusher:
    """The trainer half of the pushes of a run."""

    def __init__(
        self, board: Board, *, fleet: str, run: str, token: int, config: PushConfig, policy: WorkerGroup
    ) -> None:
        self._board = board
        self._fleet = fleet
        self._run = run
        self._token = token
        self._config = config
        self._policy = policy
        self._port: int | None = None

    async def invite(self, manifest: WeightManifest, directory: Path) -> Invited:
        """Open an epoch for the version, where a collective can reach the live replicas."""
        pin = await self._board.pinned(self._fleet)
        ours = pin is not None and (pin.run, pin.fencing_token) == (self._run, self._token)
        held = pin.replica if ours and pin is not None else None
        beats = await self._board.replicas(self._fleet)
        able = [beat for beat in beats if beat.state in _ABLE and beat.follows and beat.replica != held]
        live = tuple(beat.replica for beat in able)
        if not self._config.collective or not live:
            return Invited(live)
        if (error := unreachable(self._config.host, socket.gethostname(), {beat.host for beat in able})) is not None:
            log.warning("no collective, replicas take the artefact", version=manifest.version, error=error)
            return Invited(live, error=error)
        try:
            if self._port is None:
                self._port = int(await self._policy.call_rank(0, "open_push_store", self._config.host))
        except NightshiftError as failure:
            error = f"push.host={self._config.host}: {_cause(failure)}"
            log.warning("no collective, replicas take the artefact", version=manifest.version, error=error)
            return Invited(live, error=error)
        invitation = Invitation(
            epoch=0,
            run=self._run,
            version=manifest.version,
            digest=manifest.digest,
            directory=str(directory),
            store_host=self._config.host,
            store_port=self._port,
            backend=self._config.backend,
            fencing_token=self._token,
            op_timeout_s=self._config.op_timeout_s,
            form_timeout_s=self._config.form_timeout_s,
            deadline_s=self._config.deadline_s,
        )
        epoch = await self._board.open_epoch(self._fleet, invitation)
        reached(PushMilestone.INVITED)
        return Invited(live, epoch)

    async def deliver(self, manifest: WeightManifest, directory: Path, step: int, invited: Invited) -> PushReport:
        """Run the epoch and wait for the verdicts. Raises only Fenced and StoreUnavailable."""
        live, epoch = invited.live, invited.epoch
        report = PushReport(manifest.version, step, epoch, num_bytes=manifest.num_bytes, error=invited.error)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._config.deadline_s):
                if epoch is not None:
                    await self._broadcast(manifest, directory, epoch, live, report)
                await self._verified(manifest.version, set(live), report)
        except TimeoutError:
            log.warning("push deadline passed", version=manifest.version, missing=report.missing)
        report.seconds = time.monotonic() - started
        return report

    async def _broadcast(
        self, manifest: WeightManifest, directory: Path, epoch: int, live: Sequence[str], report: PushReport
    ) -> None:
        acks = await self._acks(epoch, set(live))
        if not acks:
            report.error = f"no replica accepted within push.invite_s={self._config.invite_s} s"
            return
        membership = freeze_membership(epoch, acks)
        await self._board.freeze(self._fleet, self._token, membership)
        reached(PushMilestone.FROZEN)
        files = [str(directory / bucket.file) for bucket in manifest.buckets]
        size = len(membership.ranks) + 1
        try:
            result = await self._policy.call_rank(0, "broadcast", epoch, size, files, self._config)
        except Fenced:
            raise
        except NightshiftError as error:
            report.error = str(error).splitlines()[0]
            log.warning("collective failed, replicas take the artefact", epoch=epoch, error=report.error)
            return
        reached(PushMilestone.SENT)
        report.form_s, report.send_s = result.form_s, result.send_s

    async def _acks(self, epoch: int, live: set[str]) -> dict[str, str]:
        give_up = time.monotonic() + self._config.invite_s
        while True:
            acks = await self._board.acks(self._fleet, epoch)
            if live <= set(acks) or time.monotonic() > give_up:
                return acks
            await asyncio.sleep(_POLL_S)

    async def _verified(self, version: int, expected: set[str], report: PushReport) -> None:
        """Until every expected replica has the version; not those that are gone, dead, called back or failed their
        check."""
        while True:
            every = await self._board.replicas(self._fleet)
            beats = {beat.replica: beat for beat in every if beat.state is not ReplicaState.DEAD}
            for replica, beat in beats.items():
                if (applied := _applied(beat, version)) is not None:
                    report.replicas[replica] = asdict(applied)
            verdicts = set(report.replicas)
            passed = {replica for replica, beat in beats.items() if beat.version >= version}
            following = {replica for replica, beat in beats.items() if beat.follows}
            report.missing = sorted((expected & following) - verdicts - passed)
            if not report.missing:
                return
            await asyncio.sleep(_POLL_S)


def _applied(beat: Heartbeat, version: int) -> AppliedPush | None:
    """The replica's newest report of the version."""
    return next((push for push in reversed(beat.pushes) if push.version == version), None)
