"""What a heartbeat says of its replica."""

import pytest

from rollout.board import ReplicaRole, ReplicaState
from tests.heartbeats import idle_beat


@pytest.mark.parametrize(
    ("state", "answers"),
    [
        (ReplicaState.RESTARTING, False),
        (ReplicaState.STALE, True),
        (ReplicaState.HEALTHY, True),
        (ReplicaState.SUSPECT, False),
        (ReplicaState.DEAD, False),
        (ReplicaState.RETIRED, False),
    ],
)
def test_users_are_answered_where_the_engine_runs_and_they_are_let_in(state: ReplicaState, answers: bool) -> None:
    assert idle_beat("a", state=state).answers is answers
    assert idle_beat("a", state=state, role=ReplicaRole.SERVING).answers is answers


@pytest.mark.parametrize("role", [role for role in ReplicaRole if role is not ReplicaRole.SERVING])
def test_a_lent_replica_answers_no_users(role: ReplicaRole) -> None:
    assert not idle_beat("a", role=role).answers
