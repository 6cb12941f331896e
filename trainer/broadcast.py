"""The trainer's end of a push epoch: bytes of the bucket files to all members, as one collective group."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rollout.push_group import Seat, Transport, joined, own_stream
from trainer.bounded import within
from trainer.config import PushConfig
from trainer.transports import gloo, nccl


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

    def __init__(self, host: str, transports: Mapping[str, Callable[[], Transport]] | None = None) -> None:
        """`transports` makes the one of a backend's name, by default gloo's and NCCL's."""
        self._host = host
        self._store = open_store(host)
        self._transports = transports or {"gloo": partial(gloo, host), "nccl": nccl}
        self._group: object = None

    @property
    def port(self) -> int:
        return int(self._store.port)

    def send(self, epoch: int, size: int, files: Sequence[Path], config: PushConfig) -> BroadcastResult:
        """Form the epoch's group of `size` members and broadcast each file as a uint8 tensor, in order.

        Raises RuntimeError when a member dies, is not there within `config.form_timeout_s`, a bucket takes longer than
        `config.op_timeout_s`, or a device's group takes longer than `config.deadline_s` altogether.
        """
        transport = self._transports[config.backend]()
        seat = self._seat(epoch, size, config)
        if transport.device is None:
            return self._send(transport, seat, files)
        # The connections of a GPU's group are made without a limit of time, so this thread may not be the one to wait.
        return within(config.deadline_s, lambda: self._send(transport, seat, files), what=f"push epoch {epoch}")

    def _seat(self, epoch: int, size: int, config: PushConfig) -> Seat:
        return Seat(
            epoch=epoch,
            rank=0,
            size=size,
            store_host=self._host,
            store_port=self.port,
            op_timeout_s=config.op_timeout_s,
            form_timeout_s=config.form_timeout_s,
            deadline_s=config.deadline_s,
        )

    def _send(self, transport: Transport, seat: Seat, files: Sequence[Path]) -> BroadcastResult:
        started = time.monotonic()
        with own_stream(torch.cuda, transport.device):
            buffer = _buffer(transport.device, files)
            with joined(transport, PrefixStore(seat.prefix, self._store), seat) as group:
                if transport.device is None:
                    # Receivers may still be reading what the kernel holds: the group lives until the next replaces it.
                    self._group = group
                self._forget_before(seat.epoch)
                formed = time.monotonic()
                total = sum(_send_file(group, file, buffer, seat) for file in files)
                sent = time.monotonic()
        return BroadcastResult(formed - started, sent - formed, total)

    def _forget_before(self, epoch: int) -> None:
        """Drop what earlier groups left in the store: addresses that nobody will read again."""
        for key in self._store.list_keys():
            if (number := _epoch_of(key)) is not None and number < epoch:
                self._store.delete_key(key)


def _epoch_of(key: str) -> int | None:
    """Of a key under `Seat.prefix`."""
    head, _, rest = key.partition("/")
    number = rest.partition("/")[0]
    return int(number) if head == "epoch" and number.isdigit() else None


def _buffer(device: torch.device | None, files: Sequence[Path]) -> torch.Tensor | None:
    if device is None:
        return None
    return torch.empty(max((file.stat().st_size for file in files), default=0), dtype=torch.uint8, device=device)


def _send_file(group: Any, file: Path, buffer: torch.Tensor | None, seat: Seat) -> int:
    # The tensor shares the array, so a bucket is in memory once.
    data = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = seat.op_timeout
    source = data if buffer is None else buffer[: len(data)].copy_(data)
    group.broadcast([source], options).wait(seat.op_timeout)
    return len(data)
