"""Users with no whole answer: what is known of them already, and that they count when the time is over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulation.engine_model import EngineModel
from deploy.simulation.felt import Felt, Unanswered, attained, attained_by
from deploy.simulation.live import constant, play
from deploy.simulation.scene import Scene
from services.config import FleetOptions
from services.slo import SloConfig

SLO = SloConfig(ttft_s=0.5, tpot_s=0.1)
TARGETS = st.one_of(st.none(), st.floats(0.01, 2))


@given(
    st.builds(SloConfig, ttft_s=TARGETS, tpot_s=TARGETS),
    *(st.floats(0.001, 5), st.floats(0, 5), st.integers(1, 30), st.floats(0, 1)),
)
def test_what_is_said_before_the_end_is_what_comes_true(
    slo: SloConfig, ttft_s: float, rest_s: float, tokens: int, share: float
) -> None:
    rest_s = rest_s if tokens > 1 else 0.0
    now = share * 0.999 * (ttft_s + rest_s)
    said = attained_by(now, Unanswered(0.0, ttft_s if ttft_s <= now else None, tokens), slo)
    assert said in {None, attained(Felt(0.0, ttft_s, rest_s / max(1, tokens - 1), tokens), slo)}


@pytest.mark.parametrize("first_at", [None, 0.3, 1.0])
def test_a_user_is_missed_when_the_slo_has_no_time_left(first_at: float | None) -> None:
    user = Unanswered(0.0, first_at, 10)
    assert attained_by(1.5, user, SLO) is None
    assert attained_by(1.51, user, SLO) is False


def test_without_one_target_the_other_decides() -> None:
    first, pace = SloConfig(ttft_s=0.5), SloConfig(tpot_s=0.1)
    assert attained_by(1.0, Unanswered(0.0, None, 10), first) is False
    assert attained_by(1.0, Unanswered(0.0, 0.4, 10), first) is True
    assert attained_by(9.0, Unanswered(0.0, None, 10), pace) is None
    assert attained_by(9.0, Unanswered(0.0, 7.0, 10), pace) is False


@pytest.mark.parametrize("door_s", [0.01, 1000.0])
def test_users_that_an_overloaded_fleet_never_answers_are_missed(door_s: float) -> None:
    model = EngineModel(decode_s=((1, 0.02), (8, 0.04)), door_s=door_s)
    options = FleetOptions.model_validate({"engine": {"max_num_seqs": 8}, "harvest": {"max_seats": 0}})
    users = list(constant(20.0, seconds=50.0, prompt=32, tokens=24, seed=5))  # more than twice what it can do
    parts = play(Scene(model, options, 1, None, None, SLO, 0), iter(users), seconds=40.0, span_s=5.0, warm_s=10.0).parts
    allowed_s = 0.5 + 24 * 0.1
    assert parts.users.sum() >= sum(10.0 <= user.time < 50.0 - allowed_s for user in users)
    assert parts.users[-2] == sum(40.0 <= user.time < 45.0 for user in users)
    assert parts.attainment is not None
    assert parts.attainment < 0.1
