"""NCCL is asked for only where it can be had, and its groups cannot end the process."""

import os

import pytest
import torch
from torch import distributed as dist

from rollout.errors import ConfigError, WeightsError
from rollout.push_group import _no_nccl_watchdog
from services.transports import nccl, nccl_refusal
from trainer import transports

WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("before", [None, "0"])
def test_only_groups_made_inside_report_to_their_waiter_alone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(WAIT, before)
    with _no_nccl_watchdog():
        assert os.environ[WAIT] == "1"
    assert os.environ.get(WAIT) == before


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_worker_without_a_gpu_refuses_nccl(device: torch.device | None) -> None:
    assert "needs a CUDA device" in nccl_refusal(device)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named_before_anything_is_formed() -> None:
    device = torch.device("cuda", 0)
    assert "a torch with NCCL" in nccl_refusal(device)
    with pytest.raises(WeightsError, match="a torch with NCCL"):
        nccl(device)
    with pytest.raises(ConfigError, match=r"push.backend=nccl needs a CUDA device and a torch with NCCL"):
        transports.nccl()
