"""A replica's part in one epoch of a push: it answers the invitation, and receives or reads its host's copy."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from rollout.board import Board, Invitation, Membership, PushPath
from rollout.weights import WeightManifest, read_manifest, verify_buckets
from services import collective
from services.background import in_background
from services.collective import Receiver
from services.delivery import Delivery, copied
from services.staging import Staging

_STEP_S = 0.01

_log = structlog.get_logger(__name__)


class Epochs:
    """Of one replica of a fleet."""

    def __init__(
        self,
        *,
        fleet: str,
        replica: str,
        host: str,
        board: Board,
        staging: Staging,
        receivers: Mapping[str, Receiver],
        accept: Callable[[Invitation, WeightManifest], None],
    ) -> None:
        """`receivers` by backend; `accept` raises WeightsError for a version that the engine cannot load."""
        self._fleet = fleet
        self._replica = replica
        self._host = host
        self._board = board
        self._staging = staging
        self._receivers = receivers
        self._accept = accept
        self._refused: set[tuple[str, str]] = set()

    async def receive(self, invitation: Invitation) -> Delivery | None:
        """None when this replica came too late for the epoch or cannot receive with its backend. Raises WeightsError,
        StoreUnavailable and OSError."""
        manifest = await asyncio.to_thread(read_manifest, Path(invitation.directory))
        self._accept(invitation, manifest)
        if (receiver := await self._receiver(invitation)) is None:
            return None
        delivery = None
        try:
            delivery = await self._take_part(invitation, receiver, manifest)
        finally:
            # It acked, so others of this host may wait for its copy, whether it heard of the group or not.
            if delivery is None:
                self._staging.fail(self._copy_name(invitation))
        return delivery

    async def _take_part(self, invitation: Invitation, receiver: Receiver, manifest: WeightManifest) -> Delivery | None:
        self._staging.expect(self._copy_name(invitation))
        await self._board.ack(self._fleet, invitation.epoch, self._replica, f"{self._host}/{self._staging.place}")
        if (membership := await self._membership(invitation)) is None:
            return None
        started = time.monotonic()
        if rank := membership.ranks.get(self._replica):
            directory = await asyncio.to_thread(self._staging.open, self._copy_name(invitation), manifest.num_bytes)
            size = len(membership.ranks) + 1
            await collective.receive(invitation, receiver, rank=rank, size=size, manifest=manifest, directory=directory)
        elif leader := membership.followers.get(self._replica):
            directory = self._staging.of(leader, invitation.version, invitation.epoch)
            await copied(directory, within_s=invitation.deadline_s)
            await in_background(verify_buckets, directory, manifest)
        else:
            return None
        receive_s = time.monotonic() - started
        artefact = Path(invitation.directory)
        return Delivery(invitation.run, manifest, directory, artefact, PushPath.COLLECTIVE, invitation.epoch, receive_s)

    def _copy_name(self, invitation: Invitation) -> str:
        return self._staging.of(self._replica, invitation.version, invitation.epoch).name

    async def _receiver(self, invitation: Invitation) -> Receiver | None:
        """Who receives with its backend; None is a refusal. Asked before the ack: whoever acks must be able to join."""
        staging = self._staging.of(self._replica, invitation.version, invitation.epoch).parent
        receiver = self._receivers.get(invitation.backend)
        if receiver is None:
            known = ", ".join(sorted(self._receivers))
            refusal = f"train.push.backend={invitation.backend} is not one that replicas receive with ({known})"
        elif not (refusal := await receiver.refusal(staging)):
            return receiver
        if (key := (invitation.run, invitation.backend)) not in self._refused:
            self._refused.add(key)
            _log.warning("epoch_refused", run=invitation.run, backend=invitation.backend, reason=refusal)
        return None

    async def _membership(self, invitation: Invitation) -> Membership | None:
        until = time.monotonic() + invitation.form_timeout_s
        while time.monotonic() < until:
            if found := await self._board.membership(self._fleet, invitation.epoch):
                return found
            await asyncio.sleep(_STEP_S)
        return None
