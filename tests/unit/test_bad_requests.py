"""The bad requests of a seed, and the gateway behind the server and the shield of Serve's proxy, which refuses them."""

from collections import Counter
from itertools import islice

import pytest

from services.gateway_app import build_app
from tests.bad_requests import NO_ANSWER, BadRequest, Target, bad_requests
from tests.raw_client import send
from tests.unit.gateway_kit import ADMIN, METRICS, MODEL, ROLLOUT, USER, fleet, kit
from tests.unit.shielded import shielded

MAX_BODY_BYTES = 200_000
TARGET = Target({"user": USER, "rollout": ROLLOUT, "admin": ADMIN, "metrics": METRICS}, MODEL, MAX_BODY_BYTES)


def first(count: int, seed: int = 5) -> list[BadRequest]:
    return list(islice(bad_requests(seed, TARGET), count))


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    assert first(300) == first(300)
    assert first(300) != first(300, seed=6)


def test_every_kind_comes_again_and_again() -> None:
    kinds = Counter(request.kind for request in first(1000))
    assert len(kinds) == 12
    assert min(kinds.values()) >= 8


def test_none_may_be_answered_as_if_it_were_good() -> None:
    for request in first(1000):
        assert all(status == NO_ANSWER or 400 <= status < 500 for status in request.statuses)
        assert bool(request.statuses) != request.leaves


async def test_each_is_refused_for_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = kit(fleet(max_body_bytes=MAX_BODY_BYTES))
    limits = {"max_body_bytes": MAX_BODY_BYTES, "linger_s": 0.2}
    async with shielded(monkeypatch, build_app(gateway.parts), limits) as port:
        tally = await send(port, iter(first(1000)))
    assert tally.problems == []
    assert tally.sent == 1000
    assert (gateway.parts.users.running, gateway.parts.rollouts.running) == (0, 0)
