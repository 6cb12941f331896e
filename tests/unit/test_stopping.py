from services.stopping import stopping


def test_nothing_stops_outside_a_replica() -> None:
    assert not stopping()
