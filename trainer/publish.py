"""Publishing a version: reserve its number, write the artefact, move the pointer, start the push.

The number is reserved before the first byte is written, so a crash anywhere leaves a gap in the numbers, never two
different contents under one.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

import structlog

from rollout.board import Board, CurrentVersion
from rollout.durable import sync_dir, write_text
from rollout.milestone import reached
from rollout.weights import MANIFEST, Canary, WeightManifest, published_versions, version_dir
from trainer.config import PushConfig
from trainer.fleet_fit import check_fleet, until_misfit
from trainer.lora import adapter_form
from trainer.lora_config import LoraConfig
from trainer.milestone import Milestone
from trainer.push import Pusher, PushReport
from trainer.worker_group import WorkerGroup

log = structlog.get_logger(__name__)


class Publisher:
    """Publishes the policy group's weights for one run."""

    def __init__(
        self,
        *,
        board: Board,
        fleet: str,
        run: str,
        token: int,
        policy_name: str,
        policy: WorkerGroup,
        weights_dir: Path,
        config: PushConfig,
        canary: Sequence[tuple[int, ...]],
        lora: LoraConfig | None = None,
        base_digests: Mapping[str, str] | None = None,
    ) -> None:
        """`base_digests` are of the weights that an adapter is trained on, by file."""
        self._board = board
        self._fleet = fleet
        self._run = run
        self._token = token
        self._policy_name = policy_name
        self._policy = policy
        self._weights_dir = weights_dir.resolve()
        self._config = config
        self._canary = tuple(canary)
        self._lora = lora
        self._base_digests = base_digests or {}
        self._pusher = Pusher(board, fleet=fleet, run=run, token=token, config=config, policy=policy)

    async def publish(self, step: int, *, above: int) -> tuple[WeightManifest, asyncio.Task[PushReport]]:
        """Make the present weights a new version (larger than `above`), current and durable; its push runs on.

        Raises Fenced, and ConfigError where the fleet cannot load what this run publishes.
        """
        check_fleet(self._lora, self._fleet, await self._board.replicas(self._fleet))
        existing = max([above, *version_numbers(self._weights_dir)])
        version = await self._board.reserve_version(self._run, self._token, at_least=existing + 1)
        reached(Milestone.VERSION_RESERVED)
        directory = version_dir(self._weights_dir, version)
        manifest = await self._write(directory, version, step)
        reached(Milestone.VERSION_WRITTEN)
        invited = await self._pusher.invite(manifest, directory)
        await self._board.set_current(
            self._run,
            self._token,
            CurrentVersion(self._policy_name, version, str(directory), manifest.digest, self._token),
        )
        reached(Milestone.VERSION_CURRENT)
        await self._retire(version)
        return manifest, asyncio.create_task(self._pusher.deliver(manifest, directory, step, invited))

    async def until_misfit(self, waits: Callable[[], bool]) -> None:
        """Until, while the run `waits`, the fleet cannot load what it publishes: raises ConfigError then."""
        await until_misfit(self._lora, self._fleet, self._board, waits=waits)

    async def _write(self, directory: Path, version: int, step: int) -> WeightManifest:
        await asyncio.to_thread(directory.mkdir, parents=True)
        exported, logprobs = (
            await self._policy.call("export", str(directory), self._config.bucket_bytes, self._canary)
        )[0]
        reached(Milestone.VERSION_EXPORTED)
        manifest = WeightManifest(
            policy=self._policy_name,
            version=version,
            step=step,
            tensors=exported.tensors,
            buckets=exported.buckets,
            canary=Canary(self._canary, tuple(tuple(values) for values in logprobs)),
            fencing_token=self._token,
            created_ms=int(time.time() * 1000),
            adapter=adapter_form(exported.tensors, self._base_digests) if self._adapter_alone else None,
        )
        await asyncio.to_thread(write_text, directory / MANIFEST, manifest.to_json())
        await asyncio.to_thread(sync_dir, self._weights_dir)
        return manifest

    @property
    def _adapter_alone(self) -> bool:
        return self._lora is not None and self._lora.publish == "adapter"

    async def _retire(self, newest: int) -> None:
        """Delete old artefacts, except those that a live replica uses or may be reading, and what crashes left."""
        used = {beat.version for beat in await self._board.replicas(self._fleet)}
        present, complete = version_numbers(self._weights_dir), published_versions(self._weights_dir)
        for version in retired_versions(present, complete, used=used, newest=newest, keep=self._config.keep_versions):
            await asyncio.to_thread(shutil.rmtree, version_dir(self._weights_dir, version))


def version_numbers(weights_dir: Path) -> list[int]:
    """Numbers of all version directories, ascending, those without a manifest included."""
    return sorted(int(path.name[1:]) for path in weights_dir.glob("v*") if path.name[1:].isdigit())


def retired_versions(
    present: Sequence[int], complete: Sequence[int], *, used: Set[int], newest: int, keep: int
) -> list[int]:
    """Which directories to delete: complete ones beyond the newest `keep` that nobody uses, and those that a crash
    before the manifest left below `newest`."""
    old = set(complete[:-keep]) - used
    unfinished = {version for version in present if version < newest} - set(complete)
    return sorted((old | unfinished) - {newest})


def canary_sequences(prompts: Sequence[Sequence[int]], *, sequences: int, tokens: int) -> list[tuple[int, ...]]:
    """Token sequences of at most `tokens` tokens, made of the run's own prompts one after the other.

    Real text keeps the logprobs in the range that rollouts see. Each has at least two tokens.
    """
    stream = [token for prompt in prompts for token in prompt]
    stream *= -(-sequences * 2 // len(stream))
    length = min(tokens, max(2, len(stream) // sequences))
    return [tuple(stream[i * length : (i + 1) * length]) for i in range(sequences)]
