import pytest

from rollout.redis_server import unsuitable

GOOD = {"redis_version": "7.2.4", "redis_mode": "standalone", "role": "master", "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize("info", [GOOD, {**GOOD, "redis_version": "6.2.14"}, {"redis_version": "255.255.255"}])
def test_a_standalone_master_that_evicts_nothing_will_do(info: dict[str, str]) -> None:
    assert unsuitable(info) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"redis_version": "6.0.20"}, "Redis 6.0.20; 6.2 or newer"),
        ({"redis_version": 5.0}, "Redis 5.0; 6.2 or newer"),
        ({"redis_version": "unstable"}, "Redis unstable; 6.2 or newer"),
        ({"redis_mode": "cluster"}, "cluster-enabled no"),
        ({"redis_mode": "sentinel"}, "redis_mode=sentinel"),
        ({"role": "slave"}, "address of its master"),
        ({"maxmemory_policy": "allkeys-lfu"}, "set noeviction"),
        ({"maxmemory_policy": "volatile-lru"}, "set noeviction"),
    ],
)
def test_any_other_is_refused_with_what_it_says_and_the_remedy(change: dict[str, object], words: str) -> None:
    assert words in str(unsuitable({**GOOD, **change}))
