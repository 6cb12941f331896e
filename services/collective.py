"""The engine half of a collective push: bytes from the trainer into staging, in a group that lives for one epoch.

Which process receives depends on the backend: gloo needs memory alone, so the replica does it itself; NCCL needs a GPU,
which only the engine's workers have.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rollout.board import Invitation
from rollout.errors import WeightsError
from rollout.push_group import Seat
from rollout.weights import WeightManifest, verify_buckets
from services.background import in_background
from services.bucket_stream import receive_buckets
from services.staging import copy_side_files, seal
from services.transports import gloo

_POLL_S = 0.05

Files = Sequence[tuple[str, int]]
"""Name and bytes of each bucket, in order."""


class Receiver(Protocol):
    """One way to get buckets into a directory."""

    async def refusal(self, staging: Path) -> str:
        """Why this replica cannot receive in this way into `staging`; empty when it can."""
        ...

    async def fetch(self, seat: Seat, files: Files, directory: Path) -> None:
        """Write the files. Raises WeightsError."""
        ...


class WorkerCalls(Protocol):
    """What receiving in the engine's first worker needs; every call returns at once."""

    async def push_refusal(self, staging: Path) -> str: ...

    async def begin_receive(self, seat: dict[str, Any], files: list[list[Any]], directory: str) -> None:
        """`seat` holds the fields of a `Seat`; only plain values cross to the worker."""
        ...

    async def receive_state(self, epoch: int) -> dict[str, Any]:
        """`done` and `error`."""
        ...


class InReplica:
    """In a thread of this process, with gloo."""

    async def refusal(self, staging: Path) -> str:  # noqa: ARG002
        return ""

    async def fetch(self, seat: Seat, files: Files, directory: Path) -> None:
        await in_background(receive_buckets, seat, files, directory, gloo())


class InWorker:
    """In the engine's worker that has the first GPU, with NCCL."""

    def __init__(self, worker: WorkerCalls) -> None:
        self._worker = worker

    async def refusal(self, staging: Path) -> str:
        try:
            return await self._worker.push_refusal(staging)
        except Exception as error:  # an engine that cannot answer is no reason to end the reconcile loop
            return f"the engine's worker did not say whether it can receive: {error!r}"

    async def fetch(self, seat: Seat, files: Files, directory: Path) -> None:
        until = time.monotonic() + seat.deadline_s
        try:
            await self._worker.begin_receive(asdict(seat), [[name, size] for name, size in files], str(directory))
            while not (state := await self._worker.receive_state(seat.epoch))["done"]:
                if state["error"]:
                    raise WeightsError(state["error"])
                if time.monotonic() > until:
                    raise WeightsError(
                        f"epoch {seat.epoch}: not received within train.push.deadline_s={seat.deadline_s} s"
                    )
                await asyncio.sleep(_POLL_S)
        except WeightsError:
            raise
        except Exception as error:
            raise WeightsError(f"epoch {seat.epoch}: the engine's worker: {error!r}") from error


async def receive(
    invitation: Invitation, receiver: Receiver, *, rank: int, size: int, manifest: WeightManifest, directory: Path
) -> None:
    """Take every bucket of the version into `directory`, check it and complete it with what the artefact has beside.

    `rank` is 1 .. size - 1; the trainer is rank 0. Raises WeightsError when the group is not whole within the
    invitation's `form_timeout_s`, a bucket takes longer than `op_timeout_s`, or bytes differ.
    """
    await receiver.fetch(seat_of(invitation, rank, size), [(b.file, b.size) for b in manifest.buckets], directory)
    await in_background(_complete, Path(invitation.directory), directory, manifest)


def seat_of(invitation: Invitation, rank: int, size: int) -> Seat:
    """This replica's place in the epoch."""
    return Seat(
        epoch=invitation.epoch,
        rank=rank,
        size=size,
        store_host=invitation.store_host,
        store_port=invitation.store_port,
        op_timeout_s=invitation.op_timeout_s,
        form_timeout_s=invitation.form_timeout_s,
        deadline_s=invitation.deadline_s,
    )


def _complete(artefact: Path, directory: Path, manifest: WeightManifest) -> None:
    copy_side_files(artefact, directory, manifest)
    verify_buckets(directory, manifest)
    seal(directory, manifest)
