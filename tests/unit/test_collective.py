"""A receiver waits for its group as long as groups may take to form, and for a bucket as long as an operation may."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from rollout.board import Invitation
from rollout.errors import WeightsError
from rollout.weights import MANIFEST, Bucket, Canary, WeightManifest, file_sha256
from services import collective

OP_S, FORM_S = 0.5, 20.0
BYTES = b"weights of one bucket"


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, WeightManifest]:
    """A published version, but for its manifest."""
    directory = tmp_path / "published"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(BYTES)
    bucket = Bucket("model.safetensors", len(BYTES), file_sha256(directory / "model.safetensors"))
    return directory, WeightManifest("policy", 1, 1, (), (bucket,), Canary((), ()), 1, 0)


@contextmanager
def trainer(*, late_s: float, sends: bool) -> Iterator[int]:
    """Rank 0, which joins late; yields the port of its store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    over = threading.Event()

    def take_part() -> None:
        time.sleep(late_s)
        prefixed = dist.PrefixStore("epoch/1", store)
        group = dist.ProcessGroupGloo(prefixed, 0, 2, timedelta(seconds=FORM_S))
        if sends:
            group.broadcast([torch.frombuffer(bytearray(BYTES), dtype=torch.uint8)], dist.BroadcastOptions()).wait()
        over.wait(FORM_S)

    thread = threading.Thread(target=take_part)
    thread.start()
    try:
        yield store.port
    finally:
        over.set()
        thread.join()


async def receive(port: int, version: tuple[Path, WeightManifest], target: Path) -> None:
    directory, manifest = version
    await asyncio.to_thread(target.mkdir)
    invitation = Invitation(
        1, "run", 1, manifest.digest, str(directory), "127.0.0.1", port, "gloo", 1, OP_S, FORM_S, 60.0
    )
    await collective.receive(invitation, collective.InReplica(), rank=1, size=2, manifest=manifest, directory=target)


async def test_a_member_later_than_an_operation_may_take_is_waited_for(
    version: tuple[Path, WeightManifest], tmp_path: Path
) -> None:
    started = time.monotonic()
    with trainer(late_s=3 * OP_S, sends=True) as port:
        await receive(port, version, tmp_path / "staged")
    assert time.monotonic() - started > OP_S
    assert (tmp_path / "staged" / "model.safetensors").read_bytes() == BYTES
    assert (tmp_path / "staged" / MANIFEST).exists()


async def test_a_bucket_that_never_comes_is_given_up_after_one_operations_time(
    version: tuple[Path, WeightManifest], tmp_path: Path
) -> None:
    with trainer(late_s=0, sends=False) as port:
        started = time.monotonic()
        with pytest.raises(WeightsError, match="epoch 1"):
            await receive(port, version, tmp_path / "staged")
        assert time.monotonic() - started < FORM_S / 2
