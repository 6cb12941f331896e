"""The ways in which the trainer takes part in a push group: gloo from memory, NCCL from the GPU of its rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from rollout.errors import ConfigError
from rollout.push_group import Seat, Transport, no_nccl_watchdog


def gloo(host: str) -> Transport:
    """The group listens on `host` and no other address."""
    return Transport(form=partial(_form_gloo, host))


def nccl() -> Transport:
    """On the device of this process's rank. Raises ConfigError where there is none, or a torch without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(
            f"push.backend=nccl needs a CUDA device and a torch with NCCL, and torch {torch.__version__} here has not"
            " both; install requirements/torch-cuda.txt or set push.backend=gloo"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return Transport(form=partial(_form_nccl, device), device=device, meets=True, close=_abort)


@contextmanager
def own_stream(device: torch.device | None) -> Iterator[None]:
    """On a GPU, off the stream that the policy is trained on: that one must not wait for a replica."""
    if device is None or device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # Always the same: torch keeps freed memory for the stream it was used on.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _form_gloo(host: str, store: Any, seat: Seat) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = seat.form_timeout
    return dist.ProcessGroupGloo(store, seat.rank, seat.size, options)


def _form_nccl(device: torch.device, store: Any, seat: Seat) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = seat.op_timeout
    with no_nccl_watchdog():
        group = dist.ProcessGroupNCCL(store, seat.rank, seat.size, options)
    try:
        group.eager_connect_single_device(device)
    except RuntimeError:
        _abort(group)
        raise
    return group


def _abort(group: Any) -> None:
    """Ends the group without its peers; a failure to end is no news on top of what came before."""
    with suppress(RuntimeError):
        group.abort()
