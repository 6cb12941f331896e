"""A fleet that lends, as an operator starts it: users have the production model all the while, rollouts the policy,
also when a replica dies on its way to rollouts, lent in the middle of a push, on its way back, or as the only one that
serves.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.constants import RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S

from rollout.board import Heartbeat, ReplicaRole
from rollout.client import RolloutClient
from rollout.client_records import Rollout
from rollout.queue import GroupStatus
from tests.fault_rows import FaultRow
from tests.fleet_processes import stopped
from tests.fleet_status import replicas
from tests.fleet_users import LONGEST, Answer, Readers, User, count, failed, users
from tests.killed_replicas import Death, Killer, delivered, healthy, segments, trainer, versions
from tests.plain_http import DIRECT
from tests.running_fleet import START_S, RunningFleet, run_fleet
from tests.tiny_models import build_policy

pytestmark = pytest.mark.timeout(900)

_LENDING = """
[fleet.sharing]
mode = "lend"
[fleet.lending]
production = {{path = "{production}", name = "assistant"}}
lend_after_s = 1
quiet_s = 2
min_gain = 0
"""
_GROUPS = 120
_CROWD = 6
"""Users whom one replica is enough for: more, and none would be lent for as long as they are remembered."""
_NOTICED_S = 8.0
"""From the end of the last replica that serves until the lent one is called back: three seconds of its silence, which
begins up to one after its end, and what a busy machine adds."""
_FOUND_S = 5.0
"""From a replica's return to users until those who wait have answers: what the router knows is two seconds old."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    directory = tmp_path_factory.mktemp("lend")
    production = build_policy(directory / "production", seed=11, context=LONGEST + 64)
    with run_fleet(directory, min_replicas=2, answers=LONGEST, more=_LENDING.format(production=production)) as running:
        yield running


def metrics(fleet: RunningFleet) -> str:
    headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
    return httpx.get(f"{fleet.url}/metrics", headers=headers, timeout=30, **DIRECT).raise_for_status().text


def roles(fleet: RunningFleet) -> list[str]:
    return sorted(replica["role"] for replica in replicas(fleet))


def until(condition: Callable[[], bool], seen: Callable[[], object], *, seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.1)


def ask(fleet: RunningFleet, max_tokens: int = 24) -> str:
    """What users get, at temperature 0: it tells the models apart."""
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    body = {"model": "assistant", "prompt": "the quick", "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60, **DIRECT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def submitted(client: RolloutClient, letter: str, *, groups: int = _GROUPS) -> Rollout:
    """A rollout of groups that no other one has."""
    prompts = [f"{letter}{number}" for number in range(groups)]
    return client.submit(prompts, n=4, sampling={"max_tokens": 60})


def ask_at_once(fleet: RunningFleet, count: int, width: int) -> set[str]:
    with ThreadPoolExecutor(width) as users:
        return set(users.map(lambda _: ask(fleet, 64)[:24], range(count)))


def test_a_replica_goes_to_rollouts_and_comes_back_and_users_always_have_their_model(fleet: RunningFleet) -> None:
    until(lambda: roles(fleet) == ["serving", "serving"], lambda: replicas(fleet))
    expected = ask(fleet)
    begun = ask(fleet, 64)[:24]
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = submitted(client, "p")
        until(lambda: "rollout" in roles(fleet), lambda: replicas(fleet))
        assert roles(fleet) == ["rollout", "serving"]
        assert {ask(fleet) for _ in range(20)} == {expected}

        deadline = time.monotonic() + START_S
        while not any("first_token" in parts(replica) for replica in replicas(fleet)):
            assert ask_at_once(fleet, 60, 24) == {begun}
            assert time.monotonic() < deadline, replicas(fleet)
        assert any(replica["reclaims"] for replica in replicas(fleet))

        assert 'part="verified"' in metrics(fleet)
        assert [group.state for group in client.stream(rollout.id, wait_s=START_S)] == ["delivered"] * _GROUPS
    assert ask(fleet) == expected


def parts(replica: dict[str, Any]) -> dict[str, float]:
    """Of its newest return to users."""
    back = [switch["parts"] for switch in replica["switches"] if switch["to"] == "serving"]
    return back[-1] if back else {}


@pytest.mark.fault("kill -9 of a lent replica in a push", "P6")
async def test_a_lent_replica_is_killed_between_invitation_and_bytes(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            rollout = submitted(client, "q")
            (lent,) = await healthy(pusher, harvests)
            with users(fleet, "assistant", count=1) as asking:
                await asyncio.sleep(1)
                await pusher.interrupted_push(lent, replicas=1)
                with fault.recovery():
                    (successor,) = await healthy(
                        pusher, lambda beat: beat.role is ReplicaRole.ROLLOUT and beat.replica != lent.replica
                    )
                await healthy(pusher, lambda beat: beat.replica == successor.replica and beat.version == 1)
                check_versions(await delivered(fleet, client, rollout), {0, 1})
            assert failed(asking) == []
            assert count(asking) > 50


@pytest.mark.fault("kill -9 of a replica on its way back to users", "P7")
async def test_a_replica_is_killed_on_its_way_back_to_users(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            rollout = submitted(client, "r")
            (lent,) = await healthy(pusher, harvests)
            with users(fleet, "assistant", count=1) as asking, users(fleet, "assistant", count=24, pause_s=0) as crowd:
                was_back = await killed_as_reclaimed(pusher, lent)
                for user in crowd:
                    user.over.set()
                with fault.recovery():
                    await healthy(pusher, lambda beat: beat.replica != lent.replica, count=2)
                await delivered(fleet, client, rollout)
            lost = failed([*asking, *crowd])
            assert [one for one in lost if not (was_back and one.begun < pusher.death.at < one.ended)] == []
            assert count(asking) > 50


@pytest.mark.fault("kill -9 of a replica whose last users finish", "P7")
async def test_a_replica_is_killed_while_its_last_users_finish(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            both = await both_serve(fleet, pusher)
            readers = Readers(fleet, "assistant", pusher.board)
            await readers.begin(both)
            rollout = submitted(client, "d")
            leaving = await in_role(pusher, ReplicaRole.DRAINING)
            with users(fleet, "assistant") as asking:
                pusher.death.of(leaving)
                with fault.recovery():
                    await healthy(pusher, lambda beat: beat.replica != leaving.replica, count=2)
                await delivered(fleet, client, rollout)
            await readers.check_lost(leaving.replica, died=pusher.death.at)
            assert failed(asking) == []
            assert count(asking) > 50


@pytest.mark.fault("kill -9 of the only replica that serves", "P7")
async def test_the_only_replica_that_serves_is_killed_and_the_lent_one_comes_back_for_users(
    fleet: RunningFleet, tmp_path: Path, fault: FaultRow
) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        async with trainer(fleet, tmp_path / "weights") as pusher:
            rollout = submitted(client, "s", groups=2 * _GROUPS)
            (lent,) = await healthy(pusher, harvests)
            (serving,) = await healthy(pusher, lambda beat: beat.role is ReplicaRole.SERVING)
            readers = Readers(fleet, "assistant", pusher.board)
            await readers.begin([serving.replica])
            with users(fleet, "assistant", count=4, since=pusher.death.known) as asking:
                pusher.death.of(serving)
                with fault.recovery():
                    back = await pusher.beat_where(
                        lambda beat: beat.replica == lent.replica and beat.role is ReplicaRole.SERVING
                    )
                await healthy(pusher, lambda beat: beat.replica != serving.replica, count=2)
                await delivered(fleet, client, rollout)
            await readers.check_lost(serving.replica, died=pusher.death.at)
            check_recall(back, pusher.death)
            assert failed(asking) == []
            assert count(asking) > 50
            assert late(asking, back_at=pusher.death.at + back_s(back, pusher.death)) == []


def harvests(beat: Heartbeat) -> bool:
    return beat.role is ReplicaRole.ROLLOUT and beat.seats_rollouts > 0


async def both_serve(fleet: RunningFleet, pusher: Killer) -> list[str]:
    """The two replicas, once a crowd of users had both and the router has forgotten it. A role reaches the router
    seconds after the board, and for some seconds it goes by how many were in a replica when it heard of it last: with
    all readers in one replica neither could be lent."""
    with users(fleet, "assistant", count=_CROWD, pause_s=0):
        beats = await healthy(pusher, lambda b: b.role is ReplicaRole.SERVING and b.seats_users > 0, count=2)
    both = [beat.replica for beat in beats]
    await healthy(pusher, lambda beat: beat.replica in both and beat.seats_users == 0, count=2)
    await asyncio.sleep(RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S + 0.5)
    return both


async def in_role(pusher: Killer, role: ReplicaRole) -> Heartbeat:
    """The first replica that says so."""
    return await first_beat(pusher, lambda beat: beat.role is role)


async def lent_no_more(pusher: Killer, lent: Heartbeat) -> None:
    """Returns when it says so, mostly as it reclaims, which takes a tenth of a second."""
    await first_beat(pusher, lambda beat: beat.replica == lent.replica and beat.role is not ReplicaRole.ROLLOUT)


async def first_beat(pusher: Killer, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
    async with asyncio.timeout(START_S):
        while True:
            for beat in await pusher.board.replicas(pusher.fleet):
                if wanted(beat):
                    return beat
            await asyncio.sleep(0.005)


async def killed_as_reclaimed(pusher: Killer, lent: Heartbeat) -> bool:
    """It gives its rollouts up, or just has. Returns whether users may have had it by then: what it said before it was
    stopped shows that."""
    await lent_no_more(pusher, lent)
    with stopped(lent.pid):
        roles = {beat.replica: beat.role for beat in await pusher.board.replicas(pusher.fleet)}
        pusher.death.of(lent)
    return roles[lent.replica] is ReplicaRole.SERVING


def check_versions(groups: Sequence[GroupStatus], published: Collection[int]) -> None:
    for segment in segments(groups):
        versions(segment, published)


def check_recall(back: Heartbeat, death: Death) -> None:
    """It was decided soon, and cut rollouts, which keep their tokens."""
    switch = back.switches[-1]
    assert switch.to is ReplicaRole.SERVING
    assert 0 < switch.decided_at - death.wall < _NOTICED_S, switch
    assert switch.cut_tokens > 0, "no rollout was under way"


def back_s(back: Heartbeat, death: Death) -> float:
    """From the death until users could have the replica."""
    switch = back.switches[-1]
    return switch.decided_at + switch.parts["verified"] - death.wall


def late(asking: Iterable[User], *, back_at: float) -> list[Answer]:
    """Answers that took longer than the recall and a little."""
    answers = [answer for user in asking for answer in user.answers]
    return [answer for answer in answers if answer.ended - max(answer.begun, back_at) > _FOUND_S]
