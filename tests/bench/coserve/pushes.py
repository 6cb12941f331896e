"""New weights every so often, as a trainer would push them, without what it does before it sends on the same cores.

Two sets of weights with their canaries are made before anything is measured. Each push names one of them as a new
version and then takes the way of every push: artefact, epoch, broadcast, canary.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from rollout.board import AppliedPush, Heartbeat
from rollout.errors import NightshiftError
from rollout.weights import MANIFEST, WeightManifest, version_dir
from services.background import in_background
from tests.fake_trainer import FakeTrainer

from .answers import Answer

_NOISE = 0.002
"""A tenth of the random policy's own spread: far more than a training step, and the policy stays as random."""
_DEADLINE_S = 60.0
_PROOF_S = 240.0
"""For all replicas to prove what was broadcast."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Push:
    """One version from its publication to its proof."""

    version: int
    published_at: float
    """Unix seconds."""
    verified_at: float | None
    """When the last replica had proved it; None where one did not in time."""
    applied: tuple[AppliedPush, ...] = ()
    """One report of each replica; none where the push failed."""
    error: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.verified_at is None else self.verified_at - self.published_at


class Pusher:
    """Pushes while `run` runs."""

    def __init__(self, trainer: FakeTrainer, *, replicas: int = 1) -> None:
        self._trainer = trainer
        self._replicas = replicas
        self._sets: list[WeightManifest] = []
        self.pushes: list[Push] = []

    @property
    def num_bytes(self) -> int:
        """Of one version."""
        return self._sets[0].num_bytes

    async def prepare(self) -> None:
        """Make the two sets of weights; takes seconds of all cores."""
        self._sets = [await self._trainer.publish(noise=_NOISE) for _ in range(2)]

    async def run(self, every_s: float, stop: asyncio.Event) -> None:
        """One push every `every_s` seconds, or as soon as the one before has ended; a push that has begun is ended."""
        due = time.monotonic()
        while not stop.is_set():
            due = max(due + every_s, time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await stop.wait()
                    return
            self.pushes.append(await self._push())

    async def publish_every(self, every_s: float) -> None:
        """Until cancelled; without an epoch, so that whoever is to follow, now or later, reads the artefact."""
        while True:
            source, manifest = await self._next()
            await in_background(self._write, source, manifest)
            await self._trainer.make_current(manifest)
            await asyncio.sleep(every_s)

    async def _next(self) -> tuple[WeightManifest, WeightManifest]:
        """The set that is copied, and what it is as a new version."""
        version = await self._trainer.board.reserve_version(self._trainer.run, self._trainer.token, at_least=1)
        source = self._sets[version % 2]
        return source, replace(source, version=version, step=version, created_ms=int(time.time() * 1000))

    async def _push(self) -> Push:
        published_at = time.time()
        source, manifest = await self._next()
        version = manifest.version
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await in_background(self._write, source, manifest)
                await self._trainer.push(manifest, replicas=self._replicas)
            applied = await self._reports(version)
        except (NightshiftError, OSError, RuntimeError, TimeoutError) as error:
            return Push(version, published_at, None, error=repr(error))
        return Push(version, published_at, proved_at(applied), applied)

    async def _reports(self, version: int) -> tuple[AppliedPush, ...]:
        """Of all replicas. Raises TimeoutError."""
        async with asyncio.timeout(_PROOF_S):
            while True:
                found = reports(await self._trainer.board.replicas(self._trainer.fleet), version)
                if len(found) >= self._replicas:
                    return found
                await asyncio.sleep(_LOOK_S)

    def _write(self, source: WeightManifest, manifest: WeightManifest) -> None:
        """Durable before it is announced, and one version older goes. The bytes are the set's, by another name: a
        trainer would not write them with the memory and the disk of the engine's machine."""
        directory = version_dir(self._trainer.weights, manifest.version)
        shutil.copytree(version_dir(self._trainer.weights, source.version), directory, copy_function=_named)
        (directory / MANIFEST).unlink()
        (directory / MANIFEST).write_text(manifest.to_json())
        for file in directory.iterdir():
            _sync(file)
        if (old := manifest.version - 3) > len(self._sets):
            shutil.rmtree(version_dir(self._trainer.weights, old), ignore_errors=True)


def reports(beats: Sequence[Heartbeat], version: int) -> tuple[AppliedPush, ...]:
    """The newest of each replica that has one of this version."""
    newest = [{push.version: push for push in beat.pushes}.get(version) for beat in beats]
    return tuple(push for push in newest if push is not None)


def proved_at(applied: Sequence[AppliedPush]) -> float | None:
    """When the last of them was; None where one was not verified."""
    return max(push.applied_at for push in applied) if all(push.verified for push in applied) else None


def felt(push: Push, answers: Sequence[Answer]) -> float | None:
    """The longest wait for a token of any user whose answer overlaps the push; None where none does."""
    if push.verified_at is None:
        return None
    waits = [answer.longest_wait(push.published_at, push.verified_at) for answer in answers]
    return max((wait for wait in waits if wait is not None), default=None)


def slowness(pushes: Sequence[Push], answers: Sequence[Answer]) -> float | None:
    """How many times as long as at other times a user's token took during a push; None where there were no tokens in or
    outside of one. By means: a chunk may bring several."""
    spans = [(push.published_at, push.verified_at) for push in pushes if push.verified_at is not None]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for since, at in (pair for answer in answers for pair in pairwise(answer.chunks_at)):
        gaps[any(start <= at < stop for start, stop in spans)].append(at - since)
    during, otherwise = (sum(found) / len(found) if found else 0.0 for found in (gaps[True], gaps[False]))
    return during / otherwise if during and otherwise else None


def _named(source: str, target: str) -> None:
    """A second name for a file."""
    os.link(source, target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
