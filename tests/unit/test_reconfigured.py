"""What an operator may change while replicas run, and what is refused."""

from pathlib import Path

import pytest

from rollout.config import ModelConfig
from services.config import EngineConfig, FleetConfig, HarvestConfig
from services.live_settings import reconfigured

CONFIG = FleetConfig(
    model=ModelConfig(path=Path("policy")),
    engine=EngineConfig(max_num_seqs=16),
    harvest=HarvestConfig(user_reserve=2, lease_s=7.0),
)


def test_what_is_not_named_stays() -> None:
    changed = reconfigured(CONFIG, {"harvest": {"max_seats": 3}, "slo": {"ttft_s": 0.5}})
    assert (changed.harvest.max_seats, changed.slo.ttft_s) == (3, 0.5)
    assert changed.harvest.model_copy(update={"max_seats": None}) == CONFIG.harvest
    assert changed.engine == CONFIG.engine
    assert reconfigured(CONFIG, {}) == reconfigured(CONFIG, {"harvest": None, "slo": {}}) == CONFIG


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"harvest": {"lease_s": 3.0}}, r"harvest\.lease_s cannot change"),
        ({"engine": {"max_num_seqs": 8}}, r"engine=.* cannot change while replicas run; harvest\.max_seats"),
        ({"engine": None}, r"engine=\{\} cannot change"),
        ({"other": {}}, r"other=\{\} cannot change"),
        ({"slo": 0.5}, r"slo=0\.5 cannot change"),
        ({"slo": {1: 2, "two": 3}}, r"slo\.1 cannot change"),
        ({"harvest": {"user_reserve": 16}}, r"user_reserve=16 .*max_num_seqs=16"),
        ({"slo": {"ttft_s": -1.0}}, r"^slo\.ttft_s: Input should be greater than 0$"),
        ({"harvest": {"purposes": []}}, r"^harvest\.purposes: harvest\.purposes=\[\] leaves .*eval, train"),
        ({"slo": {"ttft_s": 1.0}, "harvest": {"preempt": False}}, r"^user_config: slo\.ttft_s=1\.0.*preempt=false"),
    ],
)
def test_what_needs_a_restart_or_is_no_setting_is_refused(changes: dict[str, dict[str, object]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        reconfigured(CONFIG, changes)
