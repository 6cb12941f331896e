"""The trainer's half of a push, reduced to plain files: publishes seeded versions and broadcasts them."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from transformers import AutoModelForCausalLM

from rollout.board import Board, CurrentVersion, Heartbeat, Invitation, Membership
from rollout.weights import AdapterForm, Bucket, Canary, WeightManifest, file_sha256, version_dir
from services.rehearsal import canary_ids, independent_logprobs

BUCKET = "model.safetensors"
_HELD = 2
"""Buckets."""
Sequences = tuple[tuple[int, ...], ...]
Logprobs = tuple[tuple[float, ...], ...]


@dataclass
class FakeTrainer:
    """Holds the run's writer token and publishes under it."""

    fleet: str
    run: str
    board: Board
    token: int
    model: Path
    weights: Path
    send_in: Callable[..., Awaitable[None]] = asyncio.to_thread
    """Runs what broadcasts."""
    _buckets: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    """By their digests, the one that was sent last at the end."""

    async def publish(
        self, *, noise: float = 0.05, canary_shift: float = 0.0, token: int | None = None
    ) -> WeightManifest:
        """Write the next version (not yet current): the model plus noise seeded by its number."""
        version = await self.board.reserve_version(self.run, self.token, at_least=1)
        return await asyncio.to_thread(self._write, version, noise, canary_shift, token or self.token)

    async def make_current(self, manifest: WeightManifest) -> None:
        directory = str(version_dir(self.weights, manifest.version))
        current = CurrentVersion("policy", manifest.version, directory, manifest.digest, manifest.fencing_token)
        await self.board.set_current(self.run, self.token, current)

    async def push(self, manifest: WeightManifest, *, replicas: int, spoil: bool = False) -> None:
        """Invite, freeze when `replicas` acked, broadcast; `spoil` sends zeros instead of the bytes."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        invitation = Invitation(
            epoch=0,
            run=self.run,
            version=manifest.version,
            digest=manifest.digest,
            directory=str(version_dir(self.weights, manifest.version)),
            store_host="127.0.0.1",
            store_port=store.port,
            backend="gloo",
            fencing_token=self.token,
            op_timeout_s=10.0,
            form_timeout_s=15.0,
            deadline_s=60.0,
        )
        epoch = await self.board.open_epoch(self.fleet, invitation)
        await self.make_current(manifest)
        while len(acks := await self.board.acks(self.fleet, epoch)) < replicas:  # noqa: ASYNC110  state of a server
            await asyncio.sleep(0.01)
        await self.board.freeze(self.fleet, self.token, membership(epoch, acks))
        ranks = membership(epoch, acks).ranks
        await self.send_in(self._broadcast, store, epoch, len(ranks) + 1, manifest, spoil)

    async def beat_where(self, wanted: Callable[[Heartbeat], bool], *, timeout_s: float = 240.0) -> Heartbeat:
        """The first heartbeat that satisfies `wanted`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for beat in await self.board.replicas(self.fleet):
                if wanted(beat):
                    return beat
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no such heartbeat in {timeout_s} s: {await self.board.replicas(self.fleet)}")

    def _write(self, version: int, noise: float, canary_shift: float, token: int) -> WeightManifest:
        directory = version_dir(self.weights, version)
        directory.mkdir(parents=True)
        ids = canary_ids(64)
        torch.manual_seed(version)
        bucket, adapter, expected = self._weights(directory, noise, ids)
        logprobs = tuple(tuple(p + canary_shift for p in row) for row in expected)
        manifest = WeightManifest(
            policy="policy",
            version=version,
            step=version,
            tensors=(),
            buckets=(Bucket(bucket.name, bucket.stat().st_size, file_sha256(bucket)),),
            canary=Canary(ids, logprobs),
            fencing_token=token,
            created_ms=int(time.time() * 1000),
            adapter=adapter,
        )
        (directory / "manifest.json").write_text(manifest.to_json())
        return manifest

    def _weights(self, directory: Path, noise: float, ids: Sequences) -> tuple[Path, AdapterForm | None, Logprobs]:
        """The bucket, what it needs, and the canary's logprobs."""
        for file in self.model.iterdir():
            if file.name != BUCKET:
                shutil.copyfile(file, directory / file.name)
        tensors = {k: v + noise * torch.randn_like(v) for k, v in load_file(self.model / BUCKET).items()}
        save_file(tensors, directory / BUCKET, metadata={"format": "pt"})
        return directory / BUCKET, None, independent_logprobs(directory, ids)

    def _broadcast(self, store: dist.TCPStore, epoch: int, size: int, manifest: WeightManifest, spoil: bool) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore(f"epoch/{epoch}", store), 0, size, timedelta(seconds=10))
        for bucket in manifest.buckets:
            tensor = self._held(bucket, version_dir(self.weights, manifest.version))
            group.broadcast(torch.zeros_like(tensor) if spoil else tensor, 0).wait()

    def _held(self, bucket: Bucket, directory: Path) -> torch.Tensor:
        """Its bytes, which are read once while they are among the last few: a trainer has its weights in memory, and
        whoever measures a push is not to measure how fresh memory is given to a trainer on the engine's machine."""
        found = self._buckets.pop(bucket.sha256, None)
        if found is None:
            found = torch.from_numpy(np.fromfile(directory / bucket.file, np.uint8))
        self._buckets[bucket.sha256] = found
        while len(self._buckets) > _HELD:
            del self._buckets[next(iter(self._buckets))]
        return found


class AdapterTrainer(FakeTrainer):
    """Its versions are adapters alone, whose logprobs PEFT computes."""

    rank = 4
    layers: Sequence[str] = ("q_proj", "v_proj", "down_proj")

    def _weights(self, directory: Path, noise: float, ids: Sequences) -> tuple[Path, AdapterForm | None, Logprobs]:
        policy = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        config = LoraConfig(r=self.rank, lora_alpha=8, target_modules=list(self.layers), task_type="CAUSAL_LM")
        adapted = get_peft_model(policy, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0, noise)
        adapted.save_pretrained(directory)
        form = AdapterForm(self.rank, tuple(sorted(self.layers)), base="base")
        return directory / "adapter_model.safetensors", form, peft_logprobs(adapted, ids)


def peft_logprobs(model: Any, ids: Sequences) -> Logprobs:
    """As `Canary.logprobs`."""
    with torch.inference_mode():
        rows = [model.eval()(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ids]
    found = zip(rows, ids, strict=True)
    return tuple(tuple(row.gather(-1, torch.tensor(i)[1:, None])[:, 0].tolist()) for row, i in found)


def membership(epoch: int, acks: dict[str, str]) -> Membership:
    """One receiver a host, the others follow it."""
    receivers: dict[str, str] = {}
    for replica, host in sorted(acks.items()):
        receivers.setdefault(host, replica)
    ranks = {replica: i + 1 for i, replica in enumerate(receivers.values())}
    return Membership(epoch, ranks, {r: receivers[h] for r, h in acks.items() if r not in ranks})
