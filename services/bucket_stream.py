"""Buckets of an epoch, from the trainer into files, in whichever process has the transport."""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from rollout.errors import WeightsError
from rollout.push_group import Seat, Transport, joined, own_stream

_SOURCE_RANK = 0


def receive_buckets(seat: Seat, files: Sequence[tuple[str, int]], directory: Path, transport: Transport) -> None:
    """Take part in one epoch: write each of `files` (name, bytes), in order, into `directory`. Blocks.

    Nothing is checked but the sizes. Raises WeightsError when the group is not whole within the seat's
    `form_timeout_s`, a bucket takes longer than `op_timeout_s` or all of them longer than `deadline_s`.
    """
    until = time.monotonic() + seat.deadline_s
    try:
        with own_stream(torch.cuda, transport.device):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                seat.store_host,
                seat.store_port,
                is_master=False,
                timeout=seat.form_timeout,
                wait_for_workers=False,
            )
            prefixed = dist.PrefixStore(seat.prefix, store)  # type: ignore[attr-defined]
            largest = max((size for _, size in files), default=0)
            buffer = _buffer(transport.device, largest)
            with joined(transport, prefixed, seat) as group:
                for name, size in files:
                    if (left_s := until - time.monotonic()) <= 0:
                        raise WeightsError(
                            f"epoch {seat.epoch}: not received within train.push.deadline_s={seat.deadline_s:g} s"
                        )
                    limit = min(seat.op_timeout, timedelta(seconds=left_s))
                    _receive(group, directory / name, size, buffer, limit)
    except (RuntimeError, OSError) as error:  # torch.distributed raises nothing more special
        raise WeightsError(f"epoch {seat.epoch}: {error}") from error


def _buffer(device: torch.device | None, size: int) -> torch.Tensor | None:
    return None if device is None else torch.empty(size, dtype=torch.uint8, device=device)


def _receive(group: Any, path: Path, size: int, buffer: torch.Tensor | None, limit: timedelta) -> None:
    with path.open("wb") as file:
        file.truncate(size)
    # a mapping of the file itself: the bytes land in shared memory without a copy on the way
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    target = mapped if buffer is None else buffer[:size]
    options = dist.BroadcastOptions()
    options.rootRank = _SOURCE_RANK
    options.timeout = limit
    group.broadcast([target], options).wait(limit)
    if target is not mapped:
        mapped.copy_(target)
