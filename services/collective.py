"""The engine half of a collective push: bytes from the trainer into staging, in a group that lives for one epoch."""

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from rollout.board import Invitation
from rollout.errors import WeightsError
from rollout.weights import Bucket, WeightManifest, verify_buckets
from services.staging import copy_side_files, seal

_SOURCE_RANK = 0


def receive(invitation: Invitation, *, rank: int, size: int, manifest: WeightManifest, directory: Path) -> float:
    """Take every bucket of the version into `directory` and check it; returns seconds. Blocks: call it in a thread.

    `rank` is 1 .. size - 1; the trainer is rank 0. Raises WeightsError when the group is not whole within the
    invitation's `form_timeout_s`, a bucket takes longer than `op_timeout_s`, or bytes differ.
    """
    if invitation.backend != "gloo":
        raise WeightsError(f"push backend {invitation.backend!r} is not one this replica receives with (gloo)")
    started = time.monotonic()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            invitation.store_host,
            invitation.store_port,
            is_master=False,
            timeout=timedelta(seconds=invitation.form_timeout_s),
            wait_for_workers=False,
        )
        group = _form(invitation, store, rank, size)
        for bucket in manifest.buckets:
            _receive_bucket(group, bucket, directory / bucket.file, timedelta(seconds=invitation.op_timeout_s))
    except (RuntimeError, OSError) as error:  # torch.distributed raises nothing more special
        raise WeightsError(f"epoch {invitation.epoch}: {error}") from error
    copy_side_files(Path(invitation.directory), directory, manifest)
    verify_buckets(directory, manifest)
    seal(directory, manifest)
    return time.monotonic() - started


def _form(invitation: Invitation, store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    address = _address_towards(invitation.store_host, invitation.store_port)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=invitation.form_timeout_s)
    return dist.ProcessGroupGloo(_prefixed(store, invitation.epoch), rank, size, options)


def _prefixed(store: Any, epoch: int) -> Any:
    return dist.PrefixStore(f"epoch/{epoch}", store)  # type: ignore[attr-defined]


def _address_towards(host: str, port: int) -> str:
    """Of the interface that reaches the trainer; the group listens on no other."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _receive_bucket(group: Any, bucket: Bucket, path: Path, timeout: timedelta) -> None:
    with path.open("wb") as file:
        file.truncate(bucket.size)
    # a mapping of the file itself: the bytes land in shared memory without a copy on the way
    tensor = torch.from_file(str(path), shared=True, size=bucket.size, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = _SOURCE_RANK
    options.timeout = timeout
    group.broadcast([tensor], options).wait()
