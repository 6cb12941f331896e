"""What the bench of lending makes of heartbeats and answers."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.board import ReplicaRole, RoleSwitch
from tests.bench.coserve.answers import Answer
from tests.bench.coserve.slo import Slo
from tests.bench.lend.figures import day_figures, reclaim_figures, table
from tests.bench.lend.session import Told
from tests.bench.lend.verdicts import verdicts
from tests.bench.lend.watch import FleetWatch, Look

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


def beat(replica: str, at: float, tokens: int, *, lost: int = 0, **more: Any) -> Any:
    given = {"role": ReplicaRole.SERVING, "switches": (), "seats_users": 0, "seats_rollouts": 0, **more}
    return SimpleNamespace(replica=replica, sent_at=at, rollout_tokens=tokens, rollout_lost=lost, **given)


def watched(*moments: Sequence[Any]) -> FleetWatch:
    watch = FleetWatch(board=SimpleNamespace(), fleet="f")  # type: ignore[arg-type]
    for beats in moments:
        watch._take(beats)
    return watch


def test_tokens_of_a_replica_that_came_anew_are_added_and_those_that_were_lost_are_not() -> None:
    watch = watched(
        [beat("a", 1.0, 100), beat("b", 1.0, 50)],
        [beat("a", 2.0, 160, lost=10), beat("b2", 2.0, 20, role=ReplicaRole.ROLLOUT, seats_rollouts=7)],
        [],
    )
    assert [look.kept for look in watch.looks] == [150, 220]
    assert (watch.looks[-1].lent, watch.looks[-1].serving, watch.looks[-1].seats_rollouts) == (1, 1, 7)


def test_a_reclaim_is_one_that_drained_rollouts_and_without_a_user_it_is_counted_apart() -> None:
    def switch(to: ReplicaRole, at: float, *parts: str) -> RoleSwitch:
        return RoleSwitch(to, at, {name: 0.1 * (number + 1) for number, name in enumerate(parts)})

    back, whole = ReplicaRole.SERVING, ("seen", "drained", "swapped", "verified", "first_token")
    switches = (
        switch(back, 5.0, "swapped", "verified"),  # the rehearsal
        switch(ReplicaRole.ROLLOUT, 11.0, *whole[:4]),
        switch(back, 12.0, *whole[:4]),  # nobody came
        switch(back, 15.0, *whole),
        switch(back, 40.0, *whole),
    )
    watch = watched([beat("a", 50.0, 0, switches=switches)], [beat("a", 51.0, 0, switches=switches[-3:])])
    found = watch.reclaims(10.0, 30.0)
    assert [list(parts) for parts in found] == [list(whole[:4]), list(whole)]
    figures = reclaim_figures([dict(sorted(parts.items())) for parts in found], [])  # as they come out of Redis
    assert list(figures["ends_s"]) == list(whole)
    assert (figures["count"], figures["without_first_token"]) == (2, 1)
    assert figures["ends_s"]["first_token"]["p99"] == pytest.approx(0.5)
    assert figures["took_s"]["verified"]["p50"] == pytest.approx(0.1)


def test_a_days_figures_are_of_its_users_and_of_what_replicas_kept_in_it() -> None:
    fast = Answer(12.0, (12.2, 12.25), 2)
    failed = Answer(15.0, (), 0, "503")
    looks = [Look(10.0 + i, 30 * i, 1, 4, lent=1 if i < 5 else 0, serving=1) for i in range(11)]
    day = day_figures(Told(10.0, 20.0, [fast, failed], looks), SLO, seed=1)
    assert (day["requests"], day["failed"], day["attainment"]) == (2, 1, 0.5)
    assert day["harvested_tokens_s"] == pytest.approx(30.0)
    assert day["lent"] == pytest.approx(5 / 11)
    assert not math.isnan(day["ttft_s"]["p50"])
    assert "| lending | 2 | 50.0" in table({"days": {"lending": day}})


def test_a_request_that_failed_in_a_reclaim_is_the_one_thing_that_lending_may_not_do() -> None:
    parts = {"drained": 0.1, "swapped": 0.3, "first_token": 0.9}
    day = {"attainment": 0.99, "harvested_tokens_s": 300.0}
    figures = {
        "days": {"lending": day, "static": {"attainment": 0.97, "harvested_tokens_s": 600.0}},
        "reclaim": reclaim_figures([parts], [Answer(12.0, (12.2,), 1)]),
    }
    found = {verdict.name: (verdict.measured, verdict.holds) for verdict in verdicts(figures)}
    assert found["reclaim: seconds from the decision to a user's first token, p99"] == (0.9, True)
    assert found["the day: harvest of lending beside the static split's"] == (0.5, True)
    figures["reclaim"] = reclaim_figures([parts], [Answer(12.0, (), 0, "503")])
    assert [v.name for v in verdicts(figures) if v.holds is False] == ["reclaim: requests of users that failed"]
    assert {v.holds for v in verdicts({"days": {"lending": day}})} == {None}
