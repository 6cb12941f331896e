"""Latencies of a user, the promise that follows from idle ones, and the search for capacity."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.percentile import percentile
from tests.bench.coserve.answers import Answer, tokens_between
from tests.bench.coserve.slo import TARGET, CapacitySearch, Slo, attainment, refuted, slo_of


def _answer(ttft: float, tpot: float, *, tokens: int = 5, at: float = 100.0, error: str = "") -> Answer:
    return Answer(at, tuple(at + ttft + i * tpot for i in range(tokens)), tokens, error)


def test_latencies_count_from_the_scheduled_arrival() -> None:
    answer = _answer(0.5, 0.1)
    assert (answer.ttft_s, answer.tpot_s) == (pytest.approx(0.5), pytest.approx(0.1))


def test_chunks_of_several_tokens_do_not_shorten_the_time_per_token() -> None:
    assert Answer(0.0, (1.0, 2.0), 11).tpot_s == pytest.approx(0.1)


def test_a_failed_request_attains_nothing() -> None:
    slo = Slo(10.0, 10.0)
    assert attainment([_answer(0.1, 0.1), _answer(0.1, 0.1, error="429"), Answer(0.0, (), 0, "no")], slo) == 1 / 3
    assert Answer(0.0, (), 0, "no").ttft_s == math.inf


@pytest.mark.parametrize(("ttft", "tpot", "inside"), [(1.0, 0.2, True), (1.1, 0.2, False), (1.0, 0.3, False)])
def test_both_limits_count(ttft: float, tpot: float, inside: bool) -> None:
    assert Slo(1.000_1, 0.200_1).attained(_answer(ttft, tpot)) is inside


def test_the_slo_is_three_times_the_95th_percentile_of_idle_users() -> None:
    slo = slo_of([_answer(0.01 * (i + 1), 0.001 * (i + 1)) for i in range(100)])
    assert (slo.ttft_s, slo.tpot_s) == (pytest.approx(2.85), pytest.approx(0.285))


@pytest.mark.parametrize("idle", [[], [_answer(0.1, 0.1), _answer(0.1, 0.1, error="503 no")]])
def test_an_idle_user_without_an_answer_makes_no_slo(idle: list[Answer]) -> None:
    with pytest.raises(ValueError, match=r"none|503 no"):
        slo_of(idle)


def test_a_wait_counts_for_every_moment_it_spans() -> None:
    answer = Answer(10.0, (11.0, 11.1, 14.1), 3)
    assert answer.longest_wait(12.0, 12.1) == pytest.approx(3.0)
    assert answer.longest_wait(10.2, 11.05) == pytest.approx(1.0)
    assert answer.longest_wait(15.0, 16.0) is None


def test_tokens_are_counted_when_they_came() -> None:
    answers = [Answer(0.0, (1.0, 2.0), 8), Answer(0.0, (), 0, "no")]
    assert (tokens_between(answers, 0.0, 1.5), tokens_between(answers, 0.0, 9.0)) == (4.0, 8.0)


@given(st.lists(st.floats(0, 9), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_with_that_share_at_or_below_it(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


@given(st.floats(0.05, 60.0))
def test_the_search_ends_just_below_the_true_capacity(capacity: float) -> None:
    search, probes = CapacitySearch(), 0
    while (rate := search.rate()) is not None:
        search = search.after(rate, 1.0 if rate <= capacity else 0.0)
        probes += 1
    assert capacity / search.width**1.01 <= search.good <= capacity
    assert probes < 25


def test_an_accident_of_the_machine_does_not_bound_the_capacity() -> None:
    search, asked = CapacitySearch(good=4.0, bad=8.0), list[float]()
    while (rate := search.rate()) is not None:
        asked.append(rate)
        accident = asked.count(rate) == 1 and rate < 5.0
        search = search.after(rate, 0.18 if accident or rate > 5.5 else 1.0)
    assert 5.5 / search.width**1.01 <= search.good <= 5.5
    assert max(map(asked.count, asked)) <= 3  # twice, and once more to be confirmed


@given(st.lists(st.floats(0, 1), min_size=400, max_size=400))
def test_a_search_ends_whatever_its_probes_find(shares: list[float]) -> None:
    search = CapacitySearch()
    with contextlib.suppress(ValueError):
        for share in shares:
            if (rate := search.rate()) is None:
                return
            search = search.after(rate, share)
        pytest.fail(f"{search} after {len(shares)} probes")


@pytest.mark.parametrize("search", [CapacitySearch(), CapacitySearch(good=0.021, bad=0.022)])
def test_a_search_that_finds_no_capacity_ends_with_an_error(search: CapacitySearch) -> None:
    def to_the_end(now: CapacitySearch) -> None:
        for _ in range(50):
            rate = now.rate()
            assert rate is not None
            assert rate >= now.floor
            now = now.after(rate, 0.0)

    with pytest.raises(ValueError, match=r"capacity: at 0\.0\d+ users a second.*0\.01\d+, is below floor=0\.02"):
        to_the_end(search)


def test_a_rate_that_one_confirmation_refutes_is_stepped_down_from() -> None:
    search = CapacitySearch(good=4.0, bad=4.2)
    assert search.confirming
    assert search.after(4.0, TARGET).rate() is None
    lower = search.after(4.0, TARGET - 0.01)
    assert (lower.good, lower.bad) == (pytest.approx(4.0 / search.width), 4.0)
    assert lower.rate() == lower.good
    assert lower.after(lower.good, TARGET).rate() is None


def test_a_search_with_users_too_few_to_fill_the_seats_ends_with_an_error() -> None:
    def to_the_end(now: CapacitySearch) -> None:
        for _ in range(20):
            rate = now.rate()
            assert rate is not None
            now = now.after(rate, 1.0)

    with pytest.raises(
        ValueError, match=r"95% of users alone.* at 512 a second still.*1\.02e\+03, is above ceiling=1000"
    ):
        to_the_end(CapacitySearch())


def test_a_rate_is_refuted_as_soon_as_too_many_missed_for_any_end() -> None:
    slo = Slo(ttft_s=0.3, tpot_s=0.1)
    inside, missed = _answer(0.1, 0.05), _answer(0.4, 0.05)

    assert not refuted([missed] * 5, slo, 100)
    assert not refuted([inside] * 40 + [missed] * 5, slo, 100)
    assert refuted([inside] * 40 + [missed] * 6, slo, 100)
