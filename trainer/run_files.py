"""What the directory of a run says of its history, for an audit; changes nothing in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import WeightsError
from rollout.weights import MANIFEST, WeightManifest, published_versions, read_manifest, version_dir
from trainer.checkpoint import TrainerState, complete_checkpoints, read_checkpoint
from trainer.errors import CheckpointError, ForeignServer
from trainer.journal import JournalEntry, JournalError, read_journal
from trainer.json_lines import read_lines
from trainer.known_server import known_server


@dataclass(frozen=True, slots=True)
class Update:
    """A step that changed the weights, as the run's metrics have it."""

    step: int
    version: int
    """Published with it."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Journal, checkpoints, versions and metrics."""

    run: str
    journal: Sequence[JournalEntry]
    """As they were written; the last one of a step counts."""
    checkpoint: TrainerState | None
    """Newest that is intact; None before the first."""
    manifests: Sequence[WeightManifest]
    """Of the versions that are kept, ascending."""
    updates: Sequence[Update]
    """In the order in which they were done, repeated ones again."""
    damages: Sequence[str]
    """What could not be read, each named."""
    server: str | None = None
    """Name of the server that it used, see `known_server`."""

    @property
    def history(self) -> dict[int, JournalEntry]:
        """The steps that count, ascending."""
        return dict(sorted({entry.step: entry for entry in self.journal}.items()))

    @property
    def step(self) -> int:
        """Of the checkpoint; 0 before the first."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def read_run(run_dir: Path) -> RunFiles:
    """Reads every byte of the newest checkpoint, and of those before it while one is damaged. The checkpoint of a run
    that goes on is read before its journal: what the journal has beyond it is under way."""
    damages: list[str] = []
    checkpoint = _checkpoint(run_dir / "checkpoints", damages)
    return RunFiles(
        run=run_dir.name,
        checkpoint=checkpoint,
        journal=_journal(run_dir / "journal.jsonl", damages),
        manifests=_manifests(run_dir / "weights", damages),
        updates=[
            Update(int(line["step"]), int(line["published_version"]))
            for line in read_lines(run_dir / "metrics.jsonl")
            if line.get("applied") and "published_version" in line
        ],
        damages=damages,
        server=_server(run_dir, damages),
    )


def _checkpoint(directory: Path, damages: list[str]) -> TrainerState | None:
    for one in complete_checkpoints(directory):
        try:
            return read_checkpoint(one).state
        except CheckpointError as error:
            if one.exists():  # else it was retired meanwhile
                damages.append(str(error))
    return None


def _server(run_dir: Path, damages: list[str]) -> str | None:
    try:
        return known_server(run_dir)
    except ForeignServer as error:
        damages.append(str(error))
        return None


def _journal(path: Path, damages: list[str]) -> list[JournalEntry]:
    try:
        return read_journal(path)[0]
    except JournalError as error:
        damages.append(str(error))
        return []


def _manifests(weights_dir: Path, damages: list[str]) -> list[WeightManifest]:
    found = []
    for version in published_versions(weights_dir):
        directory = version_dir(weights_dir, version)
        try:
            manifest = read_manifest(directory)
        except WeightsError as error:
            if (directory / MANIFEST).exists():  # else it was retired meanwhile
                damages.append(str(error))
            continue
        if manifest.version != version:
            damages.append(f"{directory} holds version {manifest.version}")
        found.append(manifest)
    return found
