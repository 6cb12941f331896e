"""The ways in which a replica's side takes part in a push group: gloo in memory, NCCL through a GPU.

The replica and the engine's worker process both import this module.
"""

import socket
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from rollout.errors import WeightsError
from rollout.push_group import Seat, Transport, abort, form_nccl


def gloo() -> Transport:
    """Bytes land in the file's own memory, without a copy on the way."""
    return Transport(form=form_gloo)


def nccl(device: torch.device) -> Transport:
    """Bytes land on a GPU. Raises WeightsError where this process cannot take part (`nccl_refusal`)."""
    if why := nccl_refusal(device):
        raise WeightsError(why)
    return Transport(form=partial(form_nccl, dist, device), device=device, meets=True, close=abort)


def nccl_refusal(device: torch.device | None) -> str:
    """Why this process cannot receive with NCCL on `device`; empty when it can."""
    if device is None or device.type != "cuda":
        return f"push backend nccl needs a CUDA device, the engine's worker computes on {device}; use gloo"
    if not dist.is_nccl_available():
        return (
            f"push backend nccl needs a torch with NCCL, the engine's worker has {torch.__version__} without;"
            " install requirements/torch-cuda.txt or use gloo"
        )
    return ""


def form_gloo(store: Any, seat: Seat) -> Any:
    """A gloo group that listens on the interface towards the trainer and on no other."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    address = _address_towards(seat.store_host, seat.store_port)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = seat.form_timeout
    return dist.ProcessGroupGloo(store, seat.rank, seat.size, options)


def _address_towards(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
