"""The faults of a soak come from its seed alone, over all roles, and leave the fleet time to come back."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.plan import KINDS, TAIL_S, Kind, Plan, Role

seeds = st.integers(0, 2**32)


@given(seeds)
def test_the_same_seed_draws_the_same_faults(seed: int) -> None:
    assert Plan(seed, 600, 30).faults() == Plan(seed, 600, 30).faults()


def test_another_seed_draws_others() -> None:
    assert Plan(1, 600, 30).faults() != Plan(2, 600, 30).faults()


@given(seeds)
def test_every_role_gets_its_share(seed: int) -> None:
    faults = Plan(seed, 600, 30).faults()
    counts = Counter(fault.role for fault in faults)
    assert len(faults) == 18
    assert set(counts) == set(Role)
    assert set(counts.values()) == {3, 4}


@given(seeds)
def test_every_role_meets_each_of_its_kinds_before_one_of_them_again(seed: int) -> None:
    faults = Plan(seed, 600, 30).faults()
    for role, kinds in KINDS.items():
        mine = [fault.kind for fault in faults if fault.role is role]
        assert set(mine[: len(kinds)]) == set(kinds)


@given(seeds, st.floats(90, 1200), st.floats(10, 30))
def test_faults_come_apart_in_order_and_none_at_the_end(seed: int, seconds: float, every_s: float) -> None:
    faults = Plan(seed, seconds, every_s).faults()
    assert all(after.at_s - before.at_s >= every_s / 2 - 0.2 for before, after in pairwise(faults))
    assert faults[0].at_s > 0
    assert faults[-1].at_s < seconds - TAIL_S


@given(seeds)
def test_what_is_not_a_kill_ends_before_the_next_fault(seed: int) -> None:
    for fault in Plan(seed, 600, 30).faults():
        assert (fault.lasts_s == 0) == (fault.kind is Kind.KILL)
        assert fault.lasts_s <= 8
        assert 0 <= fault.pick < 1


@pytest.mark.parametrize("pick", [0.0, 0.4, 0.999])
def test_one_candidate_is_always_chosen(pick: float) -> None:
    (fault, *_) = Plan(1, 600, 30).faults()
    assert fault.chosen(["only"]) == "only"


def test_too_short_a_time_names_both_knobs() -> None:
    with pytest.raises(ValueError, match=r"60 s have no room for a fault every 30 s .* MINUTES, or a smaller EVERY_S"):
        Plan(1, 60, 30).faults()
