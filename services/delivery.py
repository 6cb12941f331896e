"""Weights that have arrived at a replica."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.board import CurrentVersion, PushPath
from rollout.errors import WeightsError
from rollout.weights import MANIFEST, WeightManifest, read_manifest, verify_buckets
from services.staging import begun, given_up

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Delivery:
    """They lie on this host, complete and digested, ready to be swapped in."""

    run: str
    manifest: WeightManifest
    directory: Path
    artefact: Path
    path: PushPath
    epoch: int | None
    receive_s: float


def from_artefact(run: str, current: CurrentVersion, accept: Callable[[WeightManifest], None]) -> Delivery:
    """The version that a run calls current, read where the trainer wrote it. Raises WeightsError when it is missing or
    damaged, and what `accept` raises."""
    started = time.monotonic()
    directory = Path(current.directory)
    manifest = read_manifest(directory)
    accept(manifest)
    try:
        verify_buckets(directory, manifest)
    except OSError as error:  # a disk that fails, or the trainer retires the version meanwhile
        raise WeightsError(f"{directory}: cannot be read: {error}") from error
    return Delivery(run, manifest, directory, directory, PushPath.ARTEFACT, None, time.monotonic() - started)


async def copied(directory: Path, *, within_s: float) -> None:
    """Returns when the receiver of this host has sealed its copy. Raises WeightsError when it does not in time, and at
    once when it never will."""
    until = time.monotonic() + within_s
    seen = False
    while not (directory / MANIFEST).exists():
        before, seen = seen, begun(directory)  # one never seen may still come: its receiver acked before it begins
        if why := "it went on to another version" if before and not seen else given_up(directory):
            raise WeightsError(f"the receiver of this host gave up {directory}: {why}")
        if time.monotonic() > until:
            raise WeightsError(f"the receiver of this host did not finish {directory}")
        await asyncio.sleep(_LOOK_S)
