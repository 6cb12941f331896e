"""An address that the policy's rank 0 cannot listen at costs the collective, not the run."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.board import ReplicaState
from trainer.config import PushConfig
from trainer.errors import WorkerDied
from trainer.push import Pusher


@dataclass
class _Rank:
    """Of a policy whose node does not have the address."""

    asked: int = 0

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        self.asked += 1
        raise WorkerDied("policy worker 0 of 1 failed: ray::PolicyWorker\nOSError: [Errno 99] Cannot assign address")


class _Board:
    async def pinned(self, _fleet: str) -> None:
        return None

    async def replicas(self, _fleet: str) -> list[Any]:
        return [SimpleNamespace(replica="r1", host="there", state=ReplicaState.HEALTHY, follows=True)]


async def test_a_version_is_delivered_by_the_artefact_and_the_address_is_named() -> None:
    policy = _Rank()
    config = PushConfig(host="192.0.2.77")
    pusher = Pusher(_Board(), fleet="f", run="r", token=1, config=config, policy=policy)  # type: ignore[arg-type]
    for version in (1, 2):
        invited = await pusher.invite(SimpleNamespace(version=version), Path("unused"))  # type: ignore[arg-type]
        assert (invited.live, invited.epoch) == (("r1",), None)
        assert invited.error == "push.host=192.0.2.77: OSError: [Errno 99] Cannot assign address"
    assert policy.asked == 2
