"""One replica of a host receives an epoch's weights, and the others read its copy: they wait for no more than that."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.board import Invitation, Membership, PushPath
from rollout.errors import StoreUnavailable, WeightsError
from rollout.push_group import Seat
from rollout.weights import Bucket, Canary, WeightManifest, file_sha256
from services import delivery
from services.collective import Files
from services.delivery import Delivery
from services.epochs import Epochs
from services.staging import Staging, given_up
from tests.reconcile_stand import Stand
from tests.unit.test_epoch_refusal import Inviting

BODY = b"weights"
LEADER, FOLLOWER = "host-1-a", "host-1-b"
NAME = "v00000007-e3"
LONG_S = 60.0
"""Deadline of the push, of which no test here is to wait a tenth."""


class Board:
    """Freezes the group for two replicas, unless it is to be silent."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.membership_of: Callable[[], Membership | None] = lambda: Membership(3, {LEADER: 1}, {FOLLOWER: LEADER})

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None: ...

    async def membership(self, fleet: str, epoch: int) -> Membership | None:
        self.asked.set()
        return self.membership_of()


class Bytes:
    """A receiver that writes the bytes when it may, or fails."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def refusal(self, staging: Path) -> str:
        return ""

    async def fetch(self, seat: Seat, files: Files, directory: Path) -> None:
        self.began.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        for name, _ in files:
            (directory / name).write_bytes(BODY)


class Host:
    """Two replicas that share a staging directory, and a version that they are invited to."""

    def __init__(self, tmp: Path) -> None:
        published = tmp / "weights"
        published.mkdir()
        (published / "model.safetensors").write_bytes(BODY)
        bucket = Bucket("model.safetensors", len(BODY), file_sha256(published / "model.safetensors"))
        manifest = WeightManifest("policy", 7, 7, (), (bucket,), Canary(((1, 2),), ((-1.0,),)), 1, 0)
        (published / "manifest.json").write_text(manifest.to_json())
        where = (str(published), "127.0.0.1", 1, "gloo")
        self.invitation = Invitation(3, "run", 7, manifest.digest, *where, 1, 1.0, 0.2, LONG_S)
        self.board, self.bytes = Board(), Bytes()
        self.stagings = {name: Staging(tmp / "staging", name) for name in (LEADER, FOLLOWER)}
        for staging in self.stagings.values():
            staging.prepare()
        self.copy = self.stagings[FOLLOWER].of(LEADER, 7, 3)

    async def receive(self, replica: str) -> Delivery | None:
        epochs = Epochs(
            fleet="fleet",
            replica=replica,
            host="host",
            board=self.board,  # type: ignore[arg-type]
            staging=self.stagings[replica],
            receivers={"gloo": self.bytes},
            accept=lambda *_: None,
        )
        return await epochs.receive(self.invitation)

    async def given_up(self, following: asyncio.Task[Delivery | None], why: str) -> None:
        with pytest.raises(WeightsError, match=rf"gave up .*{NAME}: {why}"):
            await asyncio.wait_for(following, LONG_S / 10)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_a_copy_is_read_when_it_is_sealed(host: Host) -> None:
    leading, following = (asyncio.create_task(host.receive(name)) for name in (LEADER, FOLLOWER))
    await host.bytes.began.wait()
    assert not following.done()
    host.bytes.may_end.set()
    found = [await one for one in (leading, following)]
    assert [one.directory if one else None for one in found] == [host.copy, host.copy]


async def test_followers_of_a_receiver_that_fails_hear_of_it(host: Host) -> None:
    host.bytes.error = WeightsError("a neighbour is dead")
    leading, following = (asyncio.create_task(host.receive(name)) for name in (LEADER, FOLLOWER))
    host.bytes.may_end.set()
    with pytest.raises(WeightsError, match="a neighbour is dead"):
        await leading
    await host.given_up(following, "it failed")


async def test_followers_of_a_receiver_without_room_hear_of_it_though_it_began_no_copy(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.staging._HEADROOM", 1e18)
    leading, following = (asyncio.create_task(host.receive(name)) for name in (LEADER, FOLLOWER))
    with pytest.raises(WeightsError, match="bytes free"):
        await leading
    await host.given_up(following, "it failed")


async def test_followers_of_a_receiver_that_is_stopped_amid_the_bytes_hear_of_it(host: Host) -> None:
    leading, following = (asyncio.create_task(host.receive(name)) for name in (LEADER, FOLLOWER))
    await host.bytes.began.wait()
    leading.cancel()
    await host.given_up(following, "it failed")


def silent() -> None:
    return None


def away() -> Membership | None:
    raise StoreUnavailable("Redis is away")


@pytest.mark.parametrize("answer", [silent, away])
async def test_followers_of_a_receiver_that_does_not_hear_of_its_group_hear_of_it(
    host: Host, answer: Callable[[], Membership | None]
) -> None:
    following = asyncio.create_task(host.receive(FOLLOWER))
    await host.board.asked.wait()
    host.board.membership_of = answer
    await asyncio.gather(host.receive(LEADER), return_exceptions=True)
    await host.given_up(following, "it failed")


async def test_followers_of_a_receiver_that_is_killed_do_not_wait_for_it(host: Host) -> None:
    host.stagings[LEADER].open(NAME, 1)
    following = asyncio.create_task(host.receive(FOLLOWER))
    lock = host.stagings[LEADER]._in_use
    assert lock is not None
    lock.close()
    await host.given_up(following, "its process is gone")


async def test_followers_of_a_receiver_that_stopped_do_not_wait_for_it(host: Host) -> None:
    host.stagings[LEADER].close()
    await host.given_up(asyncio.create_task(host.receive(FOLLOWER)), "its process is gone")


async def test_followers_of_a_receiver_that_went_on_to_another_version_do_not_wait_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    def look(directory: Path) -> str:
        looked.set()
        return given_up(directory)

    monkeypatch.setattr(delivery, "given_up", look)
    host.stagings[LEADER].open(NAME, 1)
    following = asyncio.create_task(host.receive(FOLLOWER))
    await looked.wait()
    host.stagings[LEADER].open("v00000008-e4", 1)
    await host.given_up(following, "it went on")


def test_a_receiver_that_has_not_begun_is_not_given_up(host: Host) -> None:
    """Between its ack and its copy: the version before lies there, of which it may have had none."""
    assert given_up(host.copy) == ""
    host.stagings[LEADER].fail("v00000006-e2")
    assert given_up(host.copy) == ""
    host.stagings[LEADER].open("v00000006-e2", 1)
    assert given_up(host.copy) == ""


async def test_followers_that_look_when_their_receiver_is_two_epochs_on_hear_of_it(host: Host) -> None:
    """They never saw its copy."""
    host.stagings[LEADER].fail(NAME)
    host.stagings[LEADER].open("v00000008-e4", 1)
    host.stagings[LEADER].fail("v00000008-e4")
    await host.given_up(asyncio.create_task(host.receive(FOLLOWER)), "it failed")


async def test_a_mark_of_an_epoch_that_had_the_number_before_redis_lost_its_data_says_nothing(host: Host) -> None:
    host.stagings[LEADER].fail(NAME)
    leading = asyncio.create_task(host.receive(LEADER))
    await host.bytes.began.wait()
    following = asyncio.create_task(host.receive(FOLLOWER))
    host.bytes.may_end.set()
    found = [await one for one in (leading, following)]
    assert [one.directory if one else None for one in found] == [host.copy, host.copy]


def test_the_newest_marks_stay(host: Host) -> None:
    for epoch in range(1, 30):
        host.stagings[LEADER].fail(f"v00000007-e{epoch}")
    left = {file.name for file in host.copy.parent.glob("*.failed")}
    assert left == {f"v00000007-e{epoch}.failed" for epoch in range(22, 30)}


async def test_a_replica_whose_receiver_failed_takes_the_artefact_in_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path)
    leader = Staging(tmp_path / "staging", "host-1-b")
    for staging in (stand.staging, leader):
        staging.prepare()

    class Following(Inviting):
        async def membership(self, fleet: str, epoch: int) -> Membership | None:
            return Membership(epoch, {"host-1-b": 1}, {"replica": "host-1-b"})

    stand.board = board = Following("gloo")
    for one in (stand.reconciler, stand.reconciler._epochs):
        monkeypatch.setattr(one, "_board", board)
    stand.publish(1)
    leader.fail("v00000001-e1")
    started = time.monotonic()
    await stand.reconciler.step()
    assert time.monotonic() - started < 5.0 / 2  # of its push's deadline
    assert (board.acks, [push.path for push in stand.reconciler.pushes]) == ([1], [PushPath.ARTEFACT])
