"""Settings that change while a replica serves, on a real engine."""

import pytest

from rollout.board import ReplicaState
from tests.engine_rig import SEATS, Rig

pytestmark = pytest.mark.timeout(300)


async def test_settings_take_effect_and_what_is_refused_changes_nothing_and_is_shown(rig: Rig) -> None:
    config = rig.config("settings")
    async with rig.trainer(config) as (trainer, _queue), rig.replica(config) as replica:
        await trainer.beat_where(lambda beat: beat.state is ReplicaState.HEALTHY)
        replica.reconfigure({"harvest": {"max_seats": 3}})
        assert (replica.keeper.seats.capacity, replica.heartbeat().detail) == (3, "")
        for wrong, named in (
            ({"slo": {"tpot_s": 1e-9}}, "slo.tpot_s=1e-09 cannot be met"),
            ({"harvest": {"lease_s": 9.0}}, "harvest.lease_s cannot change"),
        ):
            replica.reconfigure(wrong)
            assert replica.keeper.seats.capacity == 3
            assert named in replica.heartbeat().detail
        replica.reconfigure({})
        assert replica.keeper.seats.capacity == SEATS - config.harvest.user_reserve
        assert replica.heartbeat().detail == ""
