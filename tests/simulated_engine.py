"""An engine replica without vLLM: leases groups, samples with the Hugging Face model, follows published artefacts.

It speaks the same contracts as a real replica (queue, board, weights), so the trainer cannot tell the difference.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout.board import AppliedPush, Pin, PushPath
from rollout.queue import Lease
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import FinishReason, Group, Purpose, RolloutRequest, Sample, Segment, Timings, VersionSpan
from rollout.weights import read_manifest, verify_buckets
from services.purposes import leasable
from tests.heartbeats import idle_beat
from trainer.config import TrainConfig

Reward = Callable[[RolloutRequest, list[int]], float]
PURPOSES = (Purpose.EVAL, Purpose.TRAIN)


class SimulatedEngine:
    """One replica; `run` until cancelled."""

    def __init__(
        self, store: RedisStore, *, fleet: str, run: str, model_dir: Path, reward: Reward, follow: bool = True
    ) -> None:
        self.queue = RedisQueue(store, run)
        self.board = RedisBoard(store)
        self.versions_seen: list[int] = []
        self.canary_gaps: list[float] = []
        self._fleet, self._run, self._reward, self._follow = fleet, run, reward, follow
        self._name = f"sim-{id(self):x}"
        self._model = AutoModelForCausalLM.from_pretrained(model_dir)
        self._version = 0
        self._pin: Pin | None = None
        self._pushes: list[AppliedPush] = []
        self._generator = torch.Generator().manual_seed(7)

    async def run(self) -> None:
        beating = asyncio.create_task(self._beats())
        try:
            while True:
                await self._reconcile()
                purposes = leasable(
                    PURPOSES,
                    run=self._run,
                    weights={self._run},
                    pin=self._pin,
                    replica=self._name,
                    version=self._version,
                )
                leases = await self.queue.lease(self._name, count=2, lease_s=30, purposes=purposes) if purposes else []
                if not leases:
                    await asyncio.sleep(0.01)
                for lease, group in await asyncio.to_thread(self._groups, leases):
                    await self.queue.complete(lease, group)
        finally:
            beating.cancel()
            await self.board.retire(self._fleet, self._name)

    async def _beats(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(0.05)

    async def _reconcile(self) -> None:
        current = await self.board.current(self._run)
        self._pin = await self.board.pinned(self._fleet)
        if self._pinned is not None:
            return
        if not self._follow or current is None or current.version <= self._version:
            return
        directory = Path(current.directory)
        started = time.monotonic()
        manifest = read_manifest(directory)
        verify_buckets(directory, manifest)
        tensors = {k: v for b in manifest.buckets for k, v in load_file(directory / b.file).items()}
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        gap = self._canary_gap(manifest.canary.token_ids, manifest.canary.logprobs)
        self._version = current.version
        self.versions_seen.append(current.version)
        self.canary_gaps.append(gap)
        took = time.monotonic() - started
        self._pushes.append(
            AppliedPush(current.version, PushPath.ARTEFACT, None, took, 0.0, gap, gap < 0.05, time.time())
        )

    @property
    def _pinned(self) -> int | None:
        mine = self._pin is not None and (self._pin.replica, self._pin.version) == (self._name, self._version)
        return self._version if mine else None

    def _canary_gap(self, sequences: tuple[tuple[int, ...], ...], expected: tuple[tuple[float, ...], ...]) -> float:
        gaps = []
        with torch.no_grad():
            for ids, logprobs in zip(sequences, expected, strict=True):
                tensor = torch.tensor([ids])
                found = self._model(tensor).logits[0, :-1].log_softmax(-1).gather(-1, tensor[0, 1:, None])[:, 0]
                gaps += (found - torch.tensor(logprobs)).abs().tolist()
        return sum(gaps) / len(gaps)

    async def _beat(self) -> None:
        pushes = tuple(self._pushes[-4:])
        beat = idle_beat(self._name, host="localhost", version=self._version, pushes=pushes, pinned=self._pinned)
        await self.board.heartbeat(self._fleet, beat, ttl_s=5.0)

    def _groups(self, leases: list[Lease]) -> list[tuple[Lease, Group]]:
        torch.set_num_threads(1)  # of this thread: several would wait for each other on a busy machine
        return [(lease, self._generate(lease.request)) for lease in leases]

    def _generate(self, request: RolloutRequest) -> Group:
        sampling = request.sampling
        prompt = torch.tensor([request.prompt_ids]).repeat(request.n, 1)
        tokens, logprobs = [], []
        cache = None
        step = prompt
        with torch.no_grad():
            for _ in range(sampling.max_tokens):
                out = self._model(step, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[:, -1]
                if sampling.temperature == 0:
                    step = logits.argmax(-1, keepdim=True)
                    chosen = torch.zeros_like(step, dtype=torch.float32)
                else:
                    table = (logits / sampling.temperature).log_softmax(-1)
                    step = torch.multinomial(table.exp(), 1, generator=self._generator)
                    chosen = table.gather(-1, step)
                tokens.append(step)
                logprobs.append(chosen)
        ids, behavior = torch.cat(tokens, 1), torch.cat(logprobs, 1)
        samples = [self._sample(request, ids[i], behavior[i]) for i in range(request.n)]
        rewards = tuple(self._reward(request, ids[i].tolist()) for i in range(request.n))
        return Group(tuple(samples), rewards, ({},) * request.n, self._name, Timings(time.time(), 0.0, 0.0))

    def _sample(self, request: RolloutRequest, ids: torch.Tensor, behavior: torch.Tensor) -> Sample:
        count = len(ids)
        segment = Segment(
            np.array(request.prompt_ids, np.int32),
            ids.numpy().astype(np.int32),
            behavior.numpy().astype(np.float32),
            (VersionSpan(self._version, 0, count),),
            np.ones(count, np.uint8),
            FinishReason.LENGTH,
        )
        return Sample((segment,), "")


@asynccontextmanager
async def running(engine: SimulatedEngine) -> AsyncIterator[SimulatedEngine]:
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def low_ids(_request: RolloutRequest, ids: list[int]) -> float:
    """Share of response tokens below 160: dense, and learnable in a few steps."""
    return sum(i < 160 for i in ids) / len(ids)


def simulated(store: RedisStore, config: TrainConfig, *, follow: bool = True) -> SimulatedEngine:
    """One for the run of a trainer's configuration, which rewards low ids."""
    return SimulatedEngine(
        store, fleet=config.fleet, run=config.run, model_dir=config.model.path, reward=low_ids, follow=follow
    )
