"""The trainer's end of an epoch against a receiver in this process."""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.broadcast import Broadcaster
from trainer.config import PushConfig

BODY = bytes(range(200))


def receive(port: int, epoch: int, into: list[bytes]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    prefixed = dist.PrefixStore(f"epoch/{epoch}", store)  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(prefixed, 1, 2, timedelta(seconds=10))
    tensor = torch.zeros(len(BODY), dtype=torch.uint8)
    group.broadcast([tensor], dist.BroadcastOptions()).wait()
    into.append(bytes(tensor.tolist()))


def keys(broadcaster: Broadcaster) -> Sequence[str]:
    return [key for key in broadcaster._store.list_keys() if key.startswith("epoch/")]


def test_the_store_holds_the_keys_of_the_newest_epoch_alone(tmp_path: Path) -> None:
    file = tmp_path / "bucket"
    file.write_bytes(BODY)
    broadcaster, sizes = Broadcaster("127.0.0.1"), []
    for epoch in (9, 10, 11):
        received: list[bytes] = []
        receiver = threading.Thread(target=receive, args=(broadcaster.port, epoch, received))
        receiver.start()
        result = broadcaster.send(epoch, 2, [file], PushConfig())
        receiver.join(20)
        assert received == [BODY]
        assert result.num_bytes == len(BODY)
        assert all(key.startswith(f"epoch/{epoch}/") for key in keys(broadcaster))
        sizes.append(len(keys(broadcaster)))
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_a_member_that_does_not_come_is_waited_for_as_long_as_forming_may_take() -> None:
    config = PushConfig(invite_s=0.1, op_timeout_s=0.1, form_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        Broadcaster("127.0.0.1").send(1, 2, [], config)
    assert time.monotonic() - started >= config.form_timeout_s


def test_an_epoch_that_failed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    file = tmp_path / "bucket"
    file.write_bytes(BODY)
    broadcaster, received = Broadcaster("127.0.0.1"), list[bytes]()
    with pytest.raises(RuntimeError):
        broadcaster.send(1, 2, [file], PushConfig(invite_s=0.1, op_timeout_s=0.1, form_timeout_s=0.5))
    receiver = threading.Thread(target=receive, args=(broadcaster.port, 2, received))
    receiver.start()
    broadcaster.send(2, 2, [file], PushConfig())
    receiver.join(20)
    assert received == [BODY]
    assert all(key.startswith("epoch/2/") for key in keys(broadcaster))


def test_an_epoch_that_ends_late_leaves_the_keys_of_newer_ones() -> None:
    broadcaster = Broadcaster("127.0.0.1")
    for key in ("epoch/8/rank", "epoch/9/rank", "epoch/10/rank"):
        broadcaster._store.set(key, "")
    broadcaster._forget_before(9)
    assert sorted(keys(broadcaster)) == ["epoch/10/rank", "epoch/9/rank"]
