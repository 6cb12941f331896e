"""A replica that cannot receive with an epoch's backend does not accept the epoch, and takes the artefact at once."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rollout.board import Invitation, PushPath
from rollout.push_group import Seat
from services.collective import Files, InReplica, Receiver
from tests.unit.test_reconcile import Notices, Stand


class Unable:
    """As the engine's worker on a machine without a GPU."""

    async def refusal(self, staging: Path) -> str:
        return "no CUDA device"

    async def fetch(self, seat: Seat, files: Files, directory: Path) -> None:
        raise AssertionError("fetched after a refusal")


class Inviting(Notices):
    """Every version comes with an epoch of its own."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.acks: list[int] = []

    async def invitation(self, fleet: str) -> Invitation | None:
        if (now := self.now) is None:
            return None
        where = ("127.0.0.1", 1, self.backend)
        return Invitation(now.version, "run", now.version, now.digest, now.directory, *where, 1, 1.0, 1.0, 5.0)

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None:
        self.acks.append(epoch)


@pytest.mark.parametrize(
    ("backend", "receivers", "reason"),
    [
        ("nccl", {"gloo": InReplica(), "nccl": Unable()}, "no CUDA device"),
        ("carrier-pigeon", {"gloo": InReplica(), "nccl": Unable()}, "train.push.backend=carrier-pigeon"),
    ],
)
async def test_a_backend_that_cannot_be_received_is_refused_before_the_ack_and_said_once_a_run(
    backend: str, receivers: Mapping[str, Receiver], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path)
    stand.staging.prepare()
    board = Inviting(backend)
    stand.board = board
    for one in (stand.reconciler, stand.reconciler._epochs):
        monkeypatch.setattr(one, "_board", board)
    monkeypatch.setattr(stand.reconciler._epochs, "_receivers", receivers)
    with capture_logs() as logs:
        for version in (1, 2):
            stand.publish(version)
            await stand.reconciler.step()
    assert board.acks == []
    assert [push.path for push in stand.reconciler.pushes] == [PushPath.ARTEFACT] * 2
    (warning,) = [log for log in logs if log["event"] == "epoch_refused"]
    assert reason in warning["reason"]
