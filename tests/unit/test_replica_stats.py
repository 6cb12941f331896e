"""What the autoscaler hears of a replica."""

from services.idle_speed import IdleSpeed
from services.replica_stats import replica_stats
from services.seats import Seats
from services.user_load import UserLoad
from services.user_seats import UserSeats


async def test_seats_and_whether_users_can_have_the_replica_are_told() -> None:
    load = UserLoad(IdleSpeed(0.05, 0.02, 8.0), window_s=30, others=lambda: (0, 0.0), clock=lambda: 100.0)
    users, seats = UserSeats(lambda: None), Seats(4, pace=64)
    seats.ask(prefill=1)
    seats.resize(0)
    with users.hold(3):
        lent, shared = (
            replica_stats(load, users, seats, total=16, rollouts_waiting=5, lent=lent) for lent in (True, False)
        )
    assert (lent["lent"], shared["lent"]) == (1.0, 0.0)
    assert (lent["user_seats_held"], lent["seats"], lent["rollouts_waiting"]) == (3, 16, 5)
    assert (lent["rollout_seats"], lent["rollout_seats_held"]) == (1, 1)
