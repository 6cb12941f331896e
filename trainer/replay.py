"""Training from a recording: its groups in file order, in a directory of its own, without Redis or engines.

A replay takes the same steps as a live run: the same journal, checkpoints and artefacts. It repeats itself bit for bit
on a CPU, also where it was killed and started again, because nothing it decides depends on time or on version numbers:
staleness is judged by the number of updates (`progress.Progress.updates`).
"""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import structlog

from rollout.durable import write_text
from rollout.errors import ConfigError
from rollout.prompts import Prompt
from rollout.recording import Recording, RecordingName
from rollout.replay_queue import ReplayQueue
from rollout.types import Experience
from trainer.checkpoint import complete_checkpoints
from trainer.journal import JournalEntry

log = structlog.get_logger(__name__)

_SOURCE = "recording.json"
_CANARY_GROUPS = 64


class ReplayFeed:
    """Submits nothing: the groups are in the file. The cursor is the number of the next one."""

    def __init__(self, queue: ReplayQueue, *, cursor: int) -> None:
        self._queue = queue
        self.cursor = cursor
        self.unsettled = 0

    @property
    def exhausted(self) -> bool:
        return self._queue.exhausted

    async def run(self) -> None:
        await asyncio.Event().wait()

    def stepped(self, entry: JournalEntry) -> None:
        self.cursor += entry.taken


def open_recording(path: Path) -> Recording:
    """Raises RecordingError, and ConfigError where it holds no group."""
    recording = Recording(path)
    if recording.torn_bytes:
        log.warning("the recording ends within a group, which is left out", file=str(path), bytes=recording.torn_bytes)
    if not len(recording):
        recording.close()
        raise ConfigError(f"{path}: the recording of run {recording.name.run!r} holds no groups")
    return recording


def claim_source(run_dir: Path, recording: RecordingName | None) -> None:
    """Keep a run directory to one source of experience: a recording, or (None) the queue.

    Raises ConfigError where it belongs to another: groups and steps of one mean nothing to the other.
    """
    path = run_dir / _SOURCE
    known = json.loads(path.read_text()) if path.exists() else None
    if known is not None and (recording is None or known["id"] != recording.id):
        raise ConfigError(
            f"{run_dir} replays recording {known['id']} of run {known['run']!r}, not "
            f"{'the queue' if recording is None else f'{recording.id} of run {recording.run!r}'}; choose another --run"
        )
    if recording is None or known is not None:
        return
    if (run_dir / "journal.jsonl").exists() or complete_checkpoints(run_dir / "checkpoints"):
        raise ConfigError(f"{run_dir} is of a run that was trained from its queue; choose another --run for a replay")
    write_text(path, json.dumps(asdict(recording)))


def canary_prompts(recording: Recording, *, vocabulary: int | None) -> list[Prompt]:
    """Those of the first groups. Raises RecordingError, and ConfigError where a token is not of the `vocabulary`."""
    first = [recording.experience(number) for number in range(min(_CANARY_GROUPS, len(recording)))]
    largest = max(_largest_token(experience) for experience in first)
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"{recording.path} holds token id {largest}, but model.path has a vocabulary of {vocabulary}:"
            " it was recorded with another model"
        )
    return [Prompt(experience.request.prompt_ids, experience.request.prompt_text) for experience in first]


def _largest_token(experience: Experience) -> int:
    return max(segment.largest_id for sample in experience.group.samples_G for segment in sample.segments)
