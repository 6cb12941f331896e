"""A push received in the engine's worker, without a GPU: gloo and a buffer in memory take NCCL's and the GPU's place.

The trainer's end is the real one, and so is all of the receiving end but the RPC, whose values must be plain.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.board import Invitation
from rollout.errors import WeightsError
from rollout.push_group import Seat, Transport
from rollout.weights import MANIFEST, Bucket, Canary, WeightManifest, file_sha256
from services import collective
from services.background_receive import BackgroundReceive
from services.collective import InWorker
from services.transports import form_gloo
from trainer.broadcast import Broadcaster, BroadcastResult
from trainer.config import PushConfig

CONFIG = PushConfig(backend="nccl", invite_s=1.0, op_timeout_s=1.0, form_timeout_s=2.0, deadline_s=20.0)
"""For epochs that fail."""
PATIENT = PushConfig(backend="nccl")
"""For epochs that arrive, on a busy machine too."""
BODIES = {"one.safetensors": bytes(range(256)) * 40, "two.safetensors": b"a shorter one"}


def through_memory(form: Callable[[Any, Seat], Any] = form_gloo) -> Transport:
    """As NCCL's: members meet in the store, and bytes go through one buffer."""
    return Transport(form=form, device=torch.device("cpu"), meets=True)


class Worker:
    """The engine's first worker; what crosses to it and back goes through JSON."""

    def __init__(self) -> None:
        self.receiving = BackgroundReceive()
        self.transport = through_memory()

    async def push_refusal(self, staging: Path) -> str:
        return ""

    async def begin_receive(self, seat: dict[str, Any], files: list[list[Any]], directory: str) -> None:
        seat, files, directory = json.loads(json.dumps([seat, files, directory]))
        names = [(name, size) for name, size in files]
        self.receiving.begin(Seat(**seat), names, Path(directory), self.transport)

    async def receive_state(self, epoch: int) -> dict[str, Any]:
        receipt = self.receiving.receipt(epoch)
        return {"done": receipt.done, "error": receipt.error}


class Push:
    """Both ends of one push after the other."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.published = tmp / "published"
        self.published.mkdir()
        for name, body in BODIES.items():
            (self.published / name).write_bytes(body)
        (self.published / "config.json").write_text("{}")
        buckets = tuple(Bucket(name, len(body), file_sha256(self.published / name)) for name, body in BODIES.items())
        self.manifest = WeightManifest("policy", 1, 1, (), buckets, Canary((), ()), 1, 0)
        self.worker = Worker()
        self.form: Callable[[Any, Seat], Any] = form_gloo
        self.broadcaster = Broadcaster("127.0.0.1", {"nccl": lambda: through_memory(self.form)})

    def send(self, epoch: int, config: PushConfig = CONFIG) -> BroadcastResult:
        return self.broadcaster.send(epoch, 2, [self.published / name for name in BODIES], config)

    async def receive(self, epoch: int, config: PushConfig = CONFIG) -> Path:
        directory = self.tmp / f"staged-{epoch}"
        directory.mkdir()
        invitation = Invitation(
            epoch=epoch,
            run="run",
            version=1,
            digest=self.manifest.digest,
            directory=str(self.published),
            store_host="127.0.0.1",
            store_port=self.broadcaster.port,
            backend="nccl",
            fencing_token=1,
            op_timeout_s=config.op_timeout_s,
            form_timeout_s=config.form_timeout_s,
            deadline_s=config.deadline_s,
        )
        receiver = InWorker(self.worker)
        await collective.receive(invitation, receiver, rank=1, size=2, manifest=self.manifest, directory=directory)
        return directory

    async def both(self, epoch: int) -> None:
        directory, result = await asyncio.gather(
            self.receive(epoch, PATIENT), asyncio.to_thread(self.send, epoch, PATIENT)
        )
        assert {name: (directory / name).read_bytes() for name in BODIES} == BODIES
        assert (directory / MANIFEST).exists()
        assert (directory / "config.json").exists()
        assert result.num_bytes == sum(map(len, BODIES.values()))


@pytest.fixture
def push(tmp_path: Path) -> Push:
    return Push(tmp_path)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, so that no thread is left behind for good."""
    event = threading.Event()
    yield event
    event.set()


async def test_buckets_of_several_sizes_arrive_through_one_buffer_epoch_after_epoch(push: Push) -> None:
    for epoch in (1, 2, 3):
        await push.both(epoch)
    assert all(key.startswith("epoch/3/") for key in push.broadcaster._store.list_keys() if key.startswith("epoch/"))


async def test_the_worker_is_back_at_once_however_long_the_trainer_takes(push: Push) -> None:
    started = time.monotonic()
    seat = Seat(1, 1, 2, "127.0.0.1", push.broadcaster.port, 10.0, 15.0, 20.0)
    push.worker.receiving.begin(seat, [], push.tmp, push.worker.transport)
    receipt = push.worker.receiving.receipt(1)
    assert time.monotonic() - started < 5
    assert (receipt.done, receipt.error) == (False, "")
    await asyncio.to_thread(push.broadcaster.send, 1, 2, [], PATIENT)
    async with asyncio.timeout(10):
        while not receipt.done:  # noqa: ASYNC110  state of a thread
            await asyncio.sleep(0.01)


async def test_a_trainer_that_never_comes_is_given_up_and_the_next_epoch_arrives(push: Push) -> None:
    started = time.monotonic()
    with pytest.raises(WeightsError, match=r"not all 2 members of epoch 1 .* push.form_timeout_s=2.0"):
        await push.receive(1)
    assert CONFIG.form_timeout_s <= time.monotonic() - started < CONFIG.deadline_s / 2
    await push.both(2)


async def test_a_receiver_that_never_comes_is_given_up_and_the_next_epoch_arrives(push: Push) -> None:
    with pytest.raises(RuntimeError, match="not all 2 members of epoch 1"):
        await asyncio.to_thread(push.send, 1)
    await push.both(2)


async def test_a_bucket_that_never_comes_fails_the_epoch_and_the_next_arrives(push: Push) -> None:
    def nothing_sent() -> None:
        push.broadcaster.send(1, 2, [], CONFIG)

    sending = asyncio.to_thread(nothing_sent)
    results = await asyncio.gather(push.receive(1), sending, return_exceptions=True)
    assert isinstance(results[0], WeightsError)
    assert "epoch 1" in str(results[0])
    await push.both(2)


async def test_bytes_that_differ_are_not_sealed(push: Push) -> None:
    (push.published / "two.safetensors").write_bytes(b"another short")
    results = await asyncio.gather(push.receive(1), asyncio.to_thread(push.send, 1), return_exceptions=True)
    assert isinstance(results[0], WeightsError)
    assert "sha256" in str(results[0])
    assert not (push.tmp / "staged-1" / MANIFEST).exists()


async def test_a_group_that_hangs_while_forming_holds_neither_end_beyond_the_deadline_nor_the_next_epoch(
    push: Push, released: threading.Event
) -> None:
    def hang(store: Any, seat: Seat) -> Any:
        released.wait(60)
        raise RuntimeError("released")

    short = CONFIG.model_copy(update={"deadline_s": 1.0})
    push.form, push.worker.transport = hang, through_memory(hang)
    results = await asyncio.gather(
        push.receive(1, short), asyncio.to_thread(push.send, 1, short), return_exceptions=True
    )
    assert "deadline_s=1.0" in str(results[0])
    assert "within 1.0 s" in str(results[1])
    push.form, push.worker.transport = form_gloo, through_memory()
    await push.both(2)
    released.set()
    await push.both(3)
    assert push.worker.receiving.receipt(3).done


async def test_every_group_is_closed_whole_or_broken(push: Push) -> None:
    closed: list[Any] = []
    push.worker.transport = replace(push.worker.transport, close=closed.append)
    await push.both(1)
    results = await asyncio.gather(
        push.receive(2), asyncio.to_thread(push.broadcaster.send, 2, 2, [], CONFIG), return_exceptions=True
    )
    assert isinstance(results[0], WeightsError)
    assert len(closed) == 2


async def test_an_epoch_that_the_worker_did_not_begin_has_failed_for_it(push: Push) -> None:
    assert "epoch 7 was not begun here" in push.worker.receiving.receipt(7).error


async def test_a_worker_that_cannot_answer_fails_the_epoch_and_refuses_the_next(
    push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*_: object) -> None:
        raise RuntimeError("engine core is gone")

    monkeypatch.setattr(push.worker, "receive_state", dead)
    monkeypatch.setattr(push.worker, "push_refusal", dead)
    results = await asyncio.gather(push.receive(1), asyncio.to_thread(push.send, 1), return_exceptions=True)
    assert isinstance(results[0], WeightsError)
    assert "engine core is gone" in str(results[0])
    assert "engine core is gone" in await InWorker(push.worker).refusal(push.tmp)
