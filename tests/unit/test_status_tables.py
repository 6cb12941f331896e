"""What `nightshift status` shows on a narrow terminal."""

from typing import Any

import pytest

from deploy.status import _print_tables

STATES = ("accepted", "trained", "delivered", "filtered", "stale", "dead", "cancelled", "pending", "balance")
STATUS: dict[str, Any] = {
    "fleet": "fleet",
    "model": "policy",
    "durability": "always",
    "current_version": 12,
    "min_replicas": 2,
    "replicas": [
        {
            "replica": "engine-abcdef1234567890",
            "state": "stale",
            "version": 12,
            "seats_total": 64,
            "seats_users": 1,
            "seats_rollouts": 60,
            "rollout_tokens": 1234567,
            "detail": "gap 0.3 over canary_tolerance",
        }
    ],
    "seats": {"users": 1, "rollouts": 60, "free": 3},
    "users": {"ttft_ms": {"p95": 3.0}, "slo_attainment": 0.998},
    "runs": {"default": {"ledger": {state: 100_000 + i for i, state in enumerate((*STATES, "queued"))}}},
}


def test_eighty_columns_show_every_state_and_number_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _print_tables(STATUS)
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    for i, state in enumerate(STATES):
        assert ["│", state, "│", str(100_000 + i), "│"] in rows
    assert shown.splitlines()[1].startswith("replicas 0/2 healthy |")
    assert "TTFT p95 3 ms | SLO attainment 99.8%" in " ".join(shown.split())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
