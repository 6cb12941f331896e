"""What counts as a step of the engine."""

from types import SimpleNamespace

from services.step_log import StepLog


def test_a_step_that_only_reads_a_part_of_a_prompt_counts_and_news_without_a_step_does_not() -> None:
    log = StepLog()
    stats = SimpleNamespace(kv_cache_usage=0.25)
    log.record(stats, None, mm_cache_stats=None, engine_idx=0)
    log.record(stats, SimpleNamespace(inter_token_latencies_iter=[0.1]))
    log.record(None, None)
    assert (log.steps, log.kv_usage) == (2, 0.25)
