"""The trainer's end of a push epoch: bytes of the bucket files to all members, as one collective group."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.config import PushConfig


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """What one epoch's broadcast took."""

    form_s: float
    send_s: float
    num_bytes: int


def open_store(host: str) -> TCPStore:
    """A store listening on `host` alone and a free port (torch by itself would listen on every address)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Broadcaster:
    """Rank 0 of every epoch. Not thread-safe: one push at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._store = open_store(host)
        self._group: object = None

    @property
    def port(self) -> int:
        return int(self._store.port)

    def send(self, epoch: int, size: int, files: Sequence[Path], config: PushConfig) -> BroadcastResult:
        """Form the epoch's group of `size` members and broadcast each file as a uint8 tensor, in order.

        Raises RuntimeError when a member dies, is not there within `config.form_timeout_s`, or a bucket takes longer
        than `config.op_timeout_s`.
        """
        started = time.monotonic()
        store = PrefixStore(f"epoch/{epoch}", self._store)
        group = self._form(store, size, config.backend, timedelta(seconds=config.form_timeout_s))
        # Receivers may still be reading what the kernel holds: the group lives until the next epoch replaces it.
        self._group = group
        self._forget_before(epoch)
        formed = time.monotonic()
        total = 0
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = limit = timedelta(seconds=config.op_timeout_s)
        for file in files:
            # frombuffer shares the bytearray, so a bucket is in memory once.
            data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
            group.broadcast([data.cuda() if config.backend == "nccl" else data], options).wait(limit)
            total += len(data)
        return BroadcastResult(formed - started, time.monotonic() - formed, total)

    def _forget_before(self, epoch: int) -> None:
        """Drop what earlier groups left in the store: addresses that nobody will read again."""
        for key in self._store.list_keys():
            if key.startswith("epoch/") and not key.startswith(f"epoch/{epoch}/"):
                self._store.delete_key(key)

    def _form(self, store: Store, size: int, backend: str, timeout: timedelta) -> Any:
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return dist.ProcessGroupNCCL(store, 0, size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, 0, size, gloo)
