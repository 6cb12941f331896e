"""The ways in which the trainer takes part in a push group: gloo from memory, NCCL from the GPU of its rank."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollout.errors import ConfigError
from rollout.push_group import Seat, Transport, abort, form_nccl


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
    return Transport(form=partial(form_nccl, dist, device), device=device, meets=True, close=abort)


def _form_gloo(host: str, store: Any, seat: Seat) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = seat.form_timeout
    return dist.ProcessGroupGloo(store, seat.rank, seat.size, options)
