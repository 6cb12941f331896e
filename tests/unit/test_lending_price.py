"""What lending costs and brings, as heartbeats tell it."""

from dataclasses import replace

import pytest

from rollout.board import ReplicaRole, RoleSwitch
from services.lending import Price
from services.lending_price import Meter
from tests.unit.gateway_kit import beat

EXPECTED = Price(tokens_per_s=100, switch_s=30)


def test_the_harvest_of_a_replica_is_measured_while_it_has_work() -> None:
    meter = Meter(EXPECTED)
    for second in range(40):
        busy = beat("a", ReplicaRole.ROLLOUT, seats_rollouts=4, rollout_tokens=500 * second, sent_at=float(second))
        meter.observe([busy, beat("b", ReplicaRole.ROLLOUT, sent_at=float(second))], float(second))
        if second in {10, 39}:
            assert meter.price([busy]).tokens_per_s == pytest.approx(100 if second == 10 else 500)


def test_a_harvest_of_nothing_is_no_price_for_ever() -> None:
    meter = Meter(EXPECTED)
    for second in range(60):
        vain = beat("a", ReplicaRole.ROLLOUT, seats_rollouts=4, rollout_tokens=0, sent_at=float(second))
        meter.observe([vain], float(second))
    assert meter.price([]).tokens_per_s == 100
    for second in range(60, 90):
        busy = beat("a", ReplicaRole.ROLLOUT, seats_rollouts=4, rollout_tokens=second, sent_at=float(second))
        meter.observe([busy], float(second))
    assert meter.price([]).tokens_per_s < 2
    meter.observe([], 5000.0)
    assert meter.price([]).tokens_per_s == 100


def test_a_clock_that_is_set_forward_on_a_replica_is_no_time_of_harvest() -> None:
    meter = Meter(EXPECTED)
    for second in range(60):
        at = second + 3600.0 * (second >= 30)
        busy = beat("a", ReplicaRole.ROLLOUT, seats_rollouts=4, rollout_tokens=500 * second, sent_at=at)
        meter.observe([busy], float(second))
    assert meter.price([]).tokens_per_s == pytest.approx(500)


def test_the_price_of_the_swaps_is_measured_without_the_users_that_a_replica_waits_for() -> None:
    out = RoleSwitch(ReplicaRole.ROLLOUT, 1.0, {"seen": 0.1, "drained": 20.0, "swapped": 22.0, "verified": 23.0})
    back = RoleSwitch(ReplicaRole.SERVING, 2.0, {"seen": 0.1, "drained": 0.3, "swapped": 1.0, "verified": 2.0})
    found = [beat("a", switches=(out, back))]
    assert Meter(EXPECTED).price(found) == Price(100, switch_s=pytest.approx(4.9)), (
        "no two machines' clocks are compared"
    )
    assert Meter(EXPECTED).price([beat("a", switches=(out,))]) == EXPECTED


def test_the_price_of_a_reclaim_is_what_it_cut_itself_and_not_what_pushes_had_computed_again() -> None:
    rehearsed = RoleSwitch(ReplicaRole.SERVING, 0.0, {"seen": 0.1, "verified": 1.0})
    back = {"seen": 0.1, "drained": 0.2, "verified": 1.0}
    cuts = [RoleSwitch(ReplicaRole.SERVING, 2.0, back, cut_tokens=tokens) for tokens in (100, 500)]
    night = beat("a", switches=(rehearsed, *cuts), reclaims=2, rollout_prefilled_again=96_000, rollout_lost=100)
    assert Meter(EXPECTED).price([night]).spilled_tokens == 300
    unlent = beat("b", switches=(rehearsed,), rollout_prefilled_again=96_000)
    assert Meter(EXPECTED).price([unlent]).spilled_tokens == EXPECTED.spilled_tokens
    out, vain = {"seen": 0.2, "drained": 1.0}, RoleSwitch(ReplicaRole.SERVING, 4.0, back, cut_tokens=0)
    failed = replace(night, switches=(*cuts, RoleSwitch(ReplicaRole.ROLLOUT, 3.0, out), vain))
    assert Meter(EXPECTED).price([failed]).spilled_tokens == 300
