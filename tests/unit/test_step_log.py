"""What counts as a step of the engine."""

from types import SimpleNamespace

import pytest

from services.step_cost import Steps
from services.step_log import StepLog

NOW = 100.0


def step(
    *gaps: float, firsts: int = 0, tokens: int | None = None, finished: tuple[SimpleNamespace, ...] = ()
) -> SimpleNamespace:
    """As vLLM tells of one."""
    made = len(gaps) + firsts if tokens is None else tokens
    return SimpleNamespace(
        inter_token_latencies_iter=list(gaps),
        time_to_first_tokens_iter=[0.1] * firsts,
        num_generation_tokens=made,
        finished_requests=list(finished),
    )


def finished(name: str, tokens: int, **changes: float) -> SimpleNamespace:
    fields = {"e2e_latency": 0.5, "decode_time": 0.3, "num_prompt_tokens": 40, "num_cached_tokens": 16}
    return SimpleNamespace(request_id=name, num_generation_tokens=tokens, **{**fields, **changes})


def log_of(*gaps: float) -> StepLog:
    """One step after the other, the last of which ends at NOW."""
    at = NOW - sum(gaps)
    log = StepLog(lambda: at)
    for gap in gaps:
        at += gap
        log.record(None, step(gap, gap))
    at = NOW
    return log


def test_the_mean_is_of_the_newest_half_second_whatever_was_before() -> None:
    assert log_of(0.4, 0.05, 0.2, 0.1, 0.2).step_s(0.0) == pytest.approx(0.5 / 3)
    assert log_of(2.0).step_s(0.0) == 2.0


def test_steps_of_less_than_half_a_second_together_say_nothing() -> None:
    assert log_of(0.1, 0.1, 0.1).step_s(0.0) is None
    assert log_of(0.3, 0.3).step_s(NOW - 0.55) is None


def test_steps_of_an_engine_that_has_had_nothing_to_do_since_say_nothing() -> None:
    now = NOW
    log = StepLog(lambda: now)
    log.record(None, step(0.6))
    assert log.step_s(0.0) == pytest.approx(0.6)
    now = NOW + 1.1
    assert log.step_s(0.0) is None


def test_a_step_that_only_reads_a_part_of_a_prompt_counts_and_news_without_a_step_does_not() -> None:
    log = StepLog()
    stats = SimpleNamespace(kv_cache_usage=0.25)
    log.record(stats, None, mm_cache_stats=None, engine_idx=0)
    log.record(stats, step(0.1))
    log.record(None, None)
    assert (log.steps, log.kv_usage) == (2, 0.25)


def test_the_pace_of_tokens_is_that_of_steps_unless_a_step_brings_several() -> None:
    log = StepLog(lambda: NOW)
    log.record(None, step(0.6, 0.6, firsts=1))
    assert log.token_s(0.0) == log.step_s(0.0) == pytest.approx(0.6)
    log = StepLog(lambda: NOW)
    log.record(None, step(0.6, 0.6, firsts=1, tokens=9))
    assert (log.step_s(0.0), log.token_s(0.0)) == (pytest.approx(0.6), pytest.approx(0.2))


def test_a_gap_that_spans_steps_which_its_sequences_sat_out_is_no_step() -> None:
    at = NOW
    log = StepLog(lambda: at)
    for _ in range(400):
        at += 0.05
        log.record(None, step(0.05))  # a user's
    log.take()
    at += 0.05
    log.record(None, step(20.05, 20.05))  # rollouts are back
    assert log.take().seconds <= 0.35
    for _ in range(9):
        at += 0.05
        log.record(None, step(0.05))
    at += 0.05
    log.record(None, step(0.5, 0.5))
    assert log.take().seconds == pytest.approx(10 * 0.05)


def test_steps_that_are_told_of_late_and_together_are_as_long_as_they_were() -> None:
    at = NOW
    log = StepLog(lambda: at)
    for _ in range(300):
        at += 0.2
        for _ in range(4):
            log.record(None, step(0.05))
    at += 7.0
    log.record(None, step(7.0))  # a long prompt
    assert log.take().seconds == pytest.approx(300 * 0.2 + 7.0)


def test_users_answers_that_end_are_told_once_and_known_for_a_while() -> None:
    log = StepLog(lambda: NOW, own=("own-",))
    log.record(None, step(firsts=1, finished=(finished("cmpl-r-0", 4), finished("own-1", 4), finished("cmpl-e-0", 0))))
    (times,) = log.ended.take()
    assert (times.ttft_s, times.tpot_s) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (times.tokens, times.prompt, times.request) == (4, 24, "cmpl-r-0")
    assert (log.ended.take(), log.ended.of("r")) == ([], [times])
    assert log.ended.of("own") == []
    for number in range(600):
        log.record(None, step(firsts=1, finished=(finished(f"cmpl-{number}-0", 1),)))
    assert (log.ended.of("r"), len(log.ended.of("-599-"))) == ([], 1)


def test_a_clock_that_was_set_makes_no_first_token_before_its_request() -> None:
    log = StepLog(lambda: NOW)
    log.record(None, step(firsts=1, finished=(finished("r", 4, e2e_latency=-3600.0),)))
    (times,) = log.ended.take()
    assert times.ttft_s == 0.0


def test_steps_are_told_once_with_the_time_that_they_took() -> None:
    log = log_of(0.1, 0.2)
    log.record(None, step(firsts=1))
    assert log.take() == Steps(2, pytest.approx(0.3), sequences=5, tokens=5)
    assert log.take() == Steps()
