"""How a group of workers is started: which device a rank takes, and how long it may take."""

import asyncio

import pytest
import torch
import torch.distributed as dist

from rollout.errors import ConfigError
from trainer.config import WorkersConfig
from trainer.errors import WorkerDied
from trainer.policy import join_group
from trainer.ray_groups import local_ranks, within_start_timeout
from trainer.roles import answers


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("cuda", ["a", "a", "a"], [0, 0, 0]),
        ("cuda", ["a", "b", "a"], [0, 0, 0]),
        ("cpu", ["a", "a", "a"], [0, 1, 2]),
        ("cpu", ["a", "b", "a", "b"], [0, 0, 1, 1]),
    ],
)
def test_a_rank_on_cuda_takes_the_one_device_it_sees(device: str, nodes: list[str], expected: list[int]) -> None:
    assert local_ranks(nodes, device) == expected


async def test_workers_that_never_finish_loading_are_an_error_that_names_the_knob() -> None:
    workers = WorkersConfig(world_size=2, start_timeout_s=0.05)
    with pytest.raises(WorkerDied, match=r"policy: 2 worker\(s\) did not .* workers.start_timeout_s=0.05 s"):
        await asyncio.wait_for(within_start_timeout("policy", workers, asyncio.Event().wait()), 10)


async def test_a_timeout_of_the_workers_own_is_not_taken_for_the_limit() -> None:
    async def failing() -> None:
        raise TimeoutError("the store did not answer")

    with pytest.raises(TimeoutError, match="the store did not answer"):
        await within_start_timeout("policy", WorkersConfig(), failing())


async def test_workers_that_load_in_time_are_started() -> None:
    await within_start_timeout("policy", WorkersConfig(start_timeout_s=30), asyncio.sleep(0))


async def test_a_rank_that_raised_is_not_waited_for_by_way_of_the_others() -> None:
    async def raising() -> None:
        raise RuntimeError("out of memory")

    async def late() -> str:
        await asyncio.sleep(0.02)
        return "done"

    tasks = [asyncio.create_task(work) for work in (asyncio.Event().wait(), raising(), late())]
    silent, error, done = await asyncio.wait_for(answers(tasks, grace_s=0.1), 5)
    assert (silent, done) == (None, "done")
    assert isinstance(error, RuntimeError)
    await asyncio.sleep(0)
    assert tasks[0].cancelled()


async def test_answers_of_healthy_ranks_are_waited_for_as_long_as_they_take() -> None:
    tasks = [asyncio.create_task(asyncio.sleep(0.05 * rank, rank)) for rank in range(3)]
    assert await answers(tasks, grace_s=0.001) == [0, 1, 2]


def test_a_missing_accelerator_is_named_before_the_group_forms() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ConfigError, match=r"workers\.device=cuda"):
        join_group(0, 1, dist.HashStore(), device="cuda")
