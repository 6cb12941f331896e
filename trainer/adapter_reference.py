"""The reference that a policy with an adapter carries in itself: the same weights with the adapter off."""

from collections.abc import Sequence
from typing import Any

from trainer.worker_group import WorkerGroup


class AdapterReference:
    """A reference group made of the policy group's own workers; see `worker_group.WorkerGroup`."""

    def __init__(self, policy: WorkerGroup) -> None:
        self._policy = policy

    @property
    def world_size(self) -> int:
        return self._policy.world_size

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._policy.call(_of_base(method), *args)

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        return await self._policy.dispatch(_of_base(method), shares, *args)

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        return await self._policy.call_rank(rank, _of_base(method), *args)

    def close(self) -> None:
        """Nothing: the workers are the policy's."""


def _of_base(method: str) -> str:
    return "reference_logprobs" if method == "logprobs" else method
