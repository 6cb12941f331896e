"""A replica takes part in an epoch once, and in every new one, whatever numbers Redis gives them."""

from pathlib import Path

import pytest

from rollout.board import Invitation, Membership
from rollout.errors import WeightsError
from rollout.weights import WeightManifest, read_manifest, verify_buckets, version_dir
from services.delivery import copied
from services.staging import Staging, seal
from tests.reconcile_stand import Notices, Stand


class Numbering(Notices):
    """Invites into the epoch with the number that a test gives; nobody's bytes arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.acks: list[tuple[int, int]] = []
        """Epoch and version."""

    async def invitation(self, fleet: str) -> Invitation | None:
        now = self.now
        assert now is not None
        where = (now.directory, "127.0.0.1", 1, "gloo")
        return Invitation(self.number, "run", now.version, now.digest, *where, 1, 1.0, 1.0, 5.0)

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None:
        assert self.now is not None
        self.acks.append((epoch, self.now.version))

    async def membership(self, fleet: str, epoch: int) -> Membership | None:
        return Membership(epoch)


@pytest.mark.parametrize("after", [1, 8, 9])
async def test_an_epoch_that_redis_counts_anew_is_joined_and_none_twice(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from 1 after it lost its data, and so comes by the last number again."""
    stand = Stand(tmp_path)
    stand.staging.prepare()
    stand.board = board = Numbering()
    for one in (stand.reconciler, stand.reconciler._epochs):
        monkeypatch.setattr(one, "_board", board)
    stand.engine.right = False
    for number, version in ((9, 1), (after, 2)):
        board.number = number
        stand.publish(version)
        for _ in range(2):
            await stand.reconciler.step()
    assert board.acks == [(9, 1), (after, 2)]


@pytest.fixture
def published(tmp_path: Path) -> WeightManifest:
    stand = Stand(tmp_path)
    stand.publish(7)
    return read_manifest(version_dir(stand.weights, 7))


async def test_an_older_copy_under_the_same_numbers_is_not_taken_for_the_version(
    tmp_path: Path, published: WeightManifest
) -> None:
    """One that was sealed before Redis lost its data, which its receiver has not cleared yet."""
    receiver, follower = (Staging(tmp_path / "staging", f"host-1-{nonce}") for nonce in "ab")
    receiver.prepare()
    older = receiver.open("v00000007-e3", 1)
    (older / "model.safetensors").write_bytes(b"other bytes")
    seal(older, published)
    copy = follower.of("host-1-a", 7, 3)
    await copied(copy, within_s=5.0)
    with pytest.raises(WeightsError, match="sha256"):
        verify_buckets(copy, published)
