"""What users feel of a push is the longest wait for a token that overlaps it, whenever that ends."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rollout.board import Heartbeat, ReplicaState
from services.metrics import FleetSnapshot, render
from services.push_felt import PushFelt
from services.push_log import PushLog
from services.user_window import RequestTimes
from tests.reconcile_stand import Engine, Stand

LOOK_S = 0.005


def at(now: float, arrived: float, tokens: Sequence[float]) -> RequestTimes:
    """As the engine shows a sequence that gets its tokens at these times."""
    got = [token for token in tokens if token <= now]
    return RequestTimes(arrived, got[0] if got else None, got[-1] if got else None, len(got))


def felt(begin: float, end: float, users: dict[str, tuple[float, Sequence[float]]], until: float = 60.0) -> PushFelt:
    """Of a push in [begin, end], from looks every 5 ms; a sequence leaves with its last token."""
    push, now = PushFelt(begin), begin
    while now < until and not push.known:
        present = {
            name: at(now, arrived, tokens) for name, (arrived, tokens) in users.items() if arrived <= now < tokens[-1]
        }
        push.look(now, present)
        if now < end <= now + LOOK_S:
            push.over(end)
        now += LOOK_S
    return push


@pytest.mark.parametrize(
    ("arrived", "tokens", "longest_s"),
    [
        (0.0, (0.5, 1.2, 1.3, 2.9), 1.6),
        (0.0, (0.5, 1.5, 2.6, 2.7), 1.1),
        (0.0, (0.9, 1.1, 1.2, 1.3), 0.2),
        (1.5, (2.4, 2.5), 0.9),
        (1.9, (4.0, 4.1), 2.1),
        (0.2, (1.1, 1.2), 0.9),
    ],
    ids=["begins within", "spans the end", "spans the begin", "first token", "first token after it", "came before it"],
)
def test_the_longest_wait_that_overlaps_it_counts(arrived: float, tokens: Sequence[float], longest_s: float) -> None:
    push = felt(1.0, 2.0, {"a": (arrived, tokens)})
    assert push.known
    assert push.longest_s == pytest.approx(longest_s, abs=2 * LOOK_S)


def test_nobody_feels_it_who_was_there_before_or_comes_later() -> None:
    push = felt(1.0, 2.0, {"before": (0.0, (0.1, 0.9)), "later": (2.1, (9.0, 9.1))})
    assert (push.known, push.longest_s) == (True, None)


def test_whoever_waits_for_ever_keeps_no_push_open() -> None:
    push = felt(1.0, 2.0, {"stuck": (1.5, (900.0, 901.0))})
    assert push.known
    assert push.longest_s == pytest.approx(30.5, abs=0.1)


@given(
    gaps=st.lists(st.floats(0.02, 2.0), min_size=2, max_size=12), begin=st.floats(0.0, 5.0), lasts=st.floats(0.1, 3.0)
)
def test_it_is_the_longest_gap_of_those_that_have_a_part_in_it(gaps: list[float], begin: float, lasts: float) -> None:
    tokens, end = list(accumulate(gaps)), begin + lasts

    def longest(margin: float) -> float:
        pairs = pairwise([0.0, *tokens])
        return max((b - a for a, b in pairs if b > begin - margin and a < end + margin), default=0.0)

    found = felt(begin, end, {"a": (0.0, tokens)}).longest_s or 0.0
    assert longest(-LOOK_S) - 3 * LOOK_S <= found <= longest(LOOK_S) + 2 * LOOK_S


async def test_a_push_says_what_it_cost_when_the_wait_that_it_caused_is_over(tmp_path: Path) -> None:
    now = asyncio.get_running_loop().time
    users = {"a": RequestTimes(now() - 1.0, now(), now(), 1)}
    stand = Stand(tmp_path, users=lambda: users)
    for version in (1, 2):
        stand.publish(version)
        await stand.reconciler.step()
    assert [push.felt_s for push in stand.reconciler.pushes] == [None, None]
    stand.reconciler.news.clear()
    await asyncio.sleep(0.1)
    users["a"] = replace(users["a"], last=now(), tokens=2)
    async with asyncio.timeout(5):
        await stand.reconciler.news.wait()
        await asyncio.sleep(0.05)
    felt_s = [push.felt_s for push in stand.reconciler.pushes]
    assert all(seconds is not None and 0.1 <= seconds < 3.0 for seconds in felt_s)
    assert (stand.reconciler.version, sum(stand.reconciler.pushes.felt_counts)) == (2, 2)


async def test_a_push_that_nobody_met_says_nothing(tmp_path: Path) -> None:
    stand = Stand(tmp_path, Engine())
    stand.publish(1)
    await stand.reconciler.step()
    await asyncio.sleep(0.05)
    assert [push.felt_s for push in stand.reconciler.pushes] == [None]
    assert sum(stand.reconciler.pushes.felt_counts) == 0


def test_the_page_has_a_histogram_of_it() -> None:
    beat = Heartbeat("r", "host", 1, ReplicaState.HEALTHY, "policy", 0, 8, 0, 0, 0, 0, None)
    beat = replace(beat, push_felt_counts=(0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 1), push_felt_sum_s=12.0)
    page = render(CollectorRegistry(), FleetSnapshot([beat], 1, 0, {}, {})).decode().splitlines()
    assert 'nightshift_push_felt_seconds_bucket{le="0.02",replica="r"} 1.0' in page
    assert 'nightshift_push_felt_seconds_bucket{le="10.0",replica="r"} 3.0' in page
    assert 'nightshift_push_felt_seconds_count{replica="r"} 4.0' in page
    assert 'nightshift_push_felt_seconds_sum{replica="r"} 12.0' in page


async def test_looks_that_take_long_are_few() -> None:
    """They are on the loop that hands tokens on."""
    now = looks = 0.0

    def users() -> dict[str, RequestTimes]:
        nonlocal now, looks
        now, looks = now + 0.02, looks + 1
        return {}

    with PushLog(users, clock=lambda: now).arrival():
        await asyncio.sleep(0.2)
    assert looks <= 6, "of 40"
