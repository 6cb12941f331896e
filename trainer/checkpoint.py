"""Checkpoints: complete directories or none.

    checkpoints/step-00000010/  policy/ (Hugging Face directory)  optimizer.safetensors  rng-*.safetensors  state.json
                                with a critic: critic/ (Hugging Face directory)  critic-state/ (as of the policy)
                                manifest.json (sha256 of every other file, written last)

A checkpoint is written beside its place, synced, given its manifest and renamed. Resume takes the newest one whose
digests match, falls back to the one before, and never starts over silently.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from rollout.durable import sync_dir, sync_file, sync_tree, write_text
from rollout.milestone import reached
from rollout.weights import file_sha256
from trainer.errors import CheckpointError
from trainer.milestone import Milestone

log = structlog.get_logger(__name__)

_MANIFEST = "manifest.json"
_STATE = "state.json"
_SCHEMA = 1
_NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything of a run that is not tensors."""

    step: int
    """Steps done."""
    data_cursor: int
    """Prompts submitted."""
    version: int
    """Newest version published when this was written."""
    settled_ids: tuple[str, ...] = ()
    """Groups trained since the checkpoint before: to settle once this is durable, or at resume."""
    fencing_token: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    """Running sums of the summary."""
    evaluations: tuple[dict[str, Any], ...] = ()
    ledger: dict[str, int] = field(default_factory=dict)
    """Snapshot, for people."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was verified."""

    directory: Path
    state: TrainerState

    @property
    def policy_dir(self) -> Path:
        return self.directory / "policy"


class CheckpointStore:
    """The checkpoints of a run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._abandoned: tuple[Path, ...] = ()
        """Damaged ones that `newest` passed over: beyond the history that goes on."""

    async def save(
        self, state: TrainerState, write: Callable[[Path], Awaitable[None]], confirm: Callable[[], Awaitable[None]]
    ) -> Path:
        """`write` fills the directory it is given with policy/ and worker state; returns the finished checkpoint.

        `confirm` is asked before anything goes, and before the checkpoint takes its place: what it raises (Fenced, of a
        trainer that stood still while another took the run over) leaves the others as they are.
        """
        final = self._directory / f"step-{state.step:08d}"
        temporary = self._directory / f".{final.name}.tmp"
        await confirm()
        await asyncio.to_thread(self._make_room, temporary)
        await write(temporary)
        # Hashing and syncing gigabytes on the event loop would let the writer's claim expire.
        await asyncio.to_thread(_seal, temporary, state)
        reached(Milestone.CHECKPOINT_SEALED)
        await confirm()
        await _in_thread_to_its_end(self._place, temporary, final)
        return final

    def _place(self, temporary: Path, final: Path) -> None:
        if final.exists():  # of a history that a fallback abandoned
            shutil.rmtree(final)
        temporary.replace(final)
        sync_dir(self._directory)
        sync_dir(self._directory.parent)
        reached(Milestone.CHECKPOINT_RENAMED)
        self._retire()

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None when the run has none. Reads every byte of it: call it in a thread.

        A damaged one is reported and passed over once; raises CheckpointError when the one before is damaged too. What
        one that never came to its end left is removed: it may hold all the room that there is on the disk.
        """
        self._remove_unfinished()
        directories = complete_checkpoints(self._directory)
        problems = []
        for number, directory in enumerate(directories[:2]):
            try:
                found = read_checkpoint(directory)
            except CheckpointError as error:
                problems.append(str(error))
                log.warning("checkpoint damaged", directory=str(directory), error=str(error))
            else:
                self._abandoned = tuple(directories[:number])
                return found
        if problems:
            raise CheckpointError(
                f"no usable checkpoint in {self._directory}: {'; '.join(problems)}."
                " Restore one, or give the run another name"
            )
        return None

    def newest_step(self) -> int:
        """See `newest_step`."""
        return newest_step(self._directory)

    def _remove_unfinished(self) -> None:
        for left in self._directory.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def _make_room(self, temporary: Path) -> None:
        """What checkpoints that never came to their end left would fill the disk in time."""
        self._remove_unfinished()
        (temporary / "policy").mkdir(parents=True)

    def _retire(self) -> None:
        """What is newer than this one and was not passed over is another trainer's, and stays."""
        for directory in self._abandoned:
            shutil.rmtree(directory, ignore_errors=True)
        self._abandoned = ()
        for directory in complete_checkpoints(self._directory)[self._keep :]:
            shutil.rmtree(directory)


async def _in_thread_to_its_end(work: Callable[..., None], *args: object) -> None:
    """Cancelled or not: who cancels lets go of the run next, and it must not change after that."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await working
        raise


def complete_checkpoints(directory: Path) -> list[Path]:
    """Newest first. Renaming happens after the manifest, so each of them had one.

    What else lies there, such as a copy that somebody made by hand, is none of the run's and never touched.
    """
    return sorted((path for path in directory.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True)


def newest_step(directory: Path) -> int:
    """Of the newest checkpoint, which nothing is read of; 0 without one."""
    directories = complete_checkpoints(directory)
    return _step(directories[0]) if directories else 0


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _seal(directory: Path, state: TrainerState) -> None:
    write_text(directory / _STATE, json.dumps(asdict(state)))
    sync_tree(directory)
    files = {str(p.relative_to(directory)): file_sha256(p) for p in sorted(directory.rglob("*")) if p.is_file()}
    write_text(directory / _MANIFEST, json.dumps({"schema": _SCHEMA, "files": files}))
    sync_file(directory)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads every byte of it: call it in a thread. Raises CheckpointError where it is damaged."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        if manifest["schema"] != _SCHEMA:
            raise CheckpointError(f"{directory}: schema {manifest['schema']}, this version reads {_SCHEMA}")
        for name, digest in manifest["files"].items():
            if file_sha256(directory / name) != digest:
                raise CheckpointError(f"{directory / name} does not match its digest")
        raw = json.loads((directory / _STATE).read_text())
        state = {**raw, "settled_ids": tuple(raw["settled_ids"]), "evaluations": tuple(raw["evaluations"])}
        return Checkpoint(directory, TrainerState(**state))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error!r}") from error
