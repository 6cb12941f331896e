"""A synthetic recording and a replay of it, for tests that kill and restart a run."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from rollout.codec import encode_group, encode_request
from rollout.config import RedisConfig
from rollout.recording import RecordedGroup, RecordingWriter
from rollout.types import (
    FinishReason,
    Group,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)
from tests.killing import kill_at
from tests.trainer_kit import train_config
from trainer.config import TrainConfig
from trainer.milestone import Milestone

BATCH = 3
SAMPLES = 4
STALE, DEFECTIVE = 7, 11
"""Numbers of the group that is too old when its turn comes, and of the one without a token to train."""


def write_recording(
    path: Path, groups: int = 24, *, run: str = "source", flat: Container[int] = (), foreign: Container[int] = ()
) -> Path:
    """Random responses of a run whose samples lag a version or two behind, with one stale group and one defective.

    The samples of a `flat` group all have the same reward, those of a `foreign` one a token of a larger model.
    """
    rng = np.random.default_rng(5)
    with RecordingWriter(path, run=run) as file:
        file.append(
            [_recorded(number, rng, flat=number in flat, foreign=number in foreign) for number in range(groups)]
        )
    return path


def _recorded(number: int, rng: np.random.Generator, *, flat: bool, foreign: bool) -> RecordedGroup:
    prompt = rng.integers(5, 200, 6).astype(np.int32)
    due = number // BATCH + 1
    version = 0 if number == STALE else max(0, due - int(rng.integers(0, 2)))
    samples = tuple(_sample(prompt, version, rng, trains=number != DEFECTIVE) for _ in range(SAMPLES))
    if foreign:
        for sample in samples:
            sample.segments[0].response_ids_T[-1] = 5000
    rewards = (1.0,) * SAMPLES if flat else tuple(float(r) for r in rng.normal(size=SAMPLES))
    request = RolloutRequest(
        tuple(prompt.tolist()), f"prompt {number}", SAMPLES, Sampling(max_tokens=8), RewardSpec("exact_match")
    )
    group = Group(samples, rewards, ({},) * SAMPLES, "replica", Timings(0.0, 0.0, 0.0))
    return RecordedGroup(f"{number:04x}-0", (1 + number, 0), encode_request(request), encode_group(group))


def _sample(prompt: Any, version: int, rng: np.random.Generator, *, trains: bool) -> Sample:
    size = int(rng.integers(2, 9))
    segment = Segment(
        prompt,
        rng.integers(5, 200, size).astype(np.int32),
        rng.normal(-5.5, 0.2, size).astype(np.float32),
        (VersionSpan(version, 0, size),),
        np.full(size, trains, np.uint8),
        FinishReason.LENGTH,
    )
    return Sample((segment,), "")


def replay_config(tmp: Path, model: Path, run: str, recording: Path, **changes: Any) -> TrainConfig:
    """Seven steps with a checkpoint after every third, without warm-up."""
    values: dict[str, Any] = {
        "steps": 7,
        "batch_groups": BATCH,
        "sampling": {"n": SAMPLES, "max_tokens": 8},
        "staleness": {"max_age": 2},
        "workers": {"max_tokens_per_micro_batch": 64},
        "replay": recording,
        **changes,
    }
    return train_config(tmp, RedisConfig(), run, model, **values)


def result_of(config: TrainConfig, step: int | None = None) -> dict[str, bytes]:
    """What must not depend on interruptions: the newest checkpoint's tensors, the newest artefact's, the journal."""
    checkpoints = sorted((config.run_dir / "checkpoints").glob("step-*"))
    assert checkpoints, "no checkpoint"
    newest = checkpoints[-1] if step is None else config.run_dir / "checkpoints" / f"step-{step:08d}"
    files = {str(p.relative_to(newest)): p for p in sorted(newest.rglob("*.safetensors"))}
    version = max((config.run_dir / "weights").glob("v*"))
    files |= {f"version/{p.name}": p for p in version.glob("*.safetensors")}
    return {
        "checkpoint": newest.name.encode(),
        "journal": (config.run_dir / "journal.jsonl").read_bytes(),
        **{name: path.read_bytes() for name, path in files.items()},
    }


def replay_process(config: TrainConfig, milestone: Milestone, count: int, timeout_s: float = 240) -> tuple[int, str]:
    """Exit code and output of a replay in a process of its own, which dies at the milestone's `count`th time."""
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    output = config.runs_dir / f"{config.run}.log"
    context = multiprocessing.get_context("forkserver")  # imports of five seconds, which every process needs, once
    context.set_forkserver_preload(["trainer.policy", "trainer.critic", "trainer.daemon", __name__])
    process = context.Process(target=_replay_until, args=(config, milestone, count, output))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode or 0, output.read_text()


def _replay_until(config: TrainConfig, milestone: Milestone, count: int, output: Path) -> None:
    from rollout import milestone as milestones
    from trainer import daemon

    with output.open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    milestones.observer = kill_at(milestone, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(daemon.run(config))
