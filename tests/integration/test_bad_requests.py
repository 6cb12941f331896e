"""Ten thousand bad requests to a running fleet, by Serve's proxy and the gateway."""

import time
from itertools import islice

import httpx
import psutil
import pytest

from tests.api_routes import ROUTES, documented
from tests.bad_requests import Target, bad_requests
from tests.fleet_processes import gateways, proxy_of
from tests.plain_http import DIRECT
from tests.raw_client import Tally, send
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(900)
SEED = 20
TENTH = 1_000
MOST_GROWTH = 32
"""MiB of resident memory, of each process, between the first tenth and the last."""


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def target(fleet: RunningFleet) -> Target:
    tokens = {role: getattr(fleet.tokens, role) for role in ("user", "rollout", "admin", "metrics")}
    return Target(tokens, fleet.config.model.name, fleet.config.gateway.limits.max_body_bytes)


async def test_each_is_refused_and_none_leaves_anything_behind(fleet: RunningFleet, target: Target) -> None:
    requests, port = bad_requests(SEED, target), fleet.config.gateway.port
    (gateway,) = gateways(fleet)
    processes = {"proxy": proxy_of(fleet), "gateway": psutil.Process(gateway)}
    memory: dict[str, list[int]] = {name: [] for name in processes}
    tallies: list[Tally] = []
    began = time.monotonic()
    for _ in range(10):
        tallies.append(await send(port, islice(requests, TENTH)))
        for name, process in processes.items():
            memory[name].append(process.memory_info().rss >> 20)
    took_s = time.monotonic() - began
    print(f"seed {SEED}: {took_s:.1f} s; MiB after each thousand {memory}; {counts(*tallies)}")
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.sent for tally in tallies) == 10 * TENTH
    assert max(sizes[-1] - sizes[0] for sizes in memory.values()) < MOST_GROWTH, memory
    await check_service(fleet)


def counts(*tallies: Tally) -> dict[int, int]:
    """Answers by status."""
    found: dict[int, int] = {}
    for tally in tallies:
        for (_, status), count in tally.answers.items():
            found[status] = found.get(status, 0) + count
    return dict(sorted(found.items()))


async def check_service(fleet: RunningFleet) -> None:
    """It answers as before, and nobody's place is taken."""
    asked = {"prompt": "the quick", "max_tokens": 4}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60, **DIRECT) as http:
        assert (await http.get("/healthz")).status_code == 200
        answer = await http.post("/v1/completions", json=asked, headers=bearer(fleet.tokens.user))
        assert answer.status_code == 200, answer.text
        runs = (await http.get("/v1/status", headers=bearer(fleet.tokens.admin))).json()["runs"]
    assert all(run["ledger"]["balance"] == 0 for run in runs.values())


def test_every_documented_route_wants_a_token_of_its_role(fleet: RunningFleet, target: Target) -> None:
    with httpx.Client(base_url=fleet.url, timeout=60, **DIRECT) as http:
        paths = http.get("/openapi.json", headers=bearer(fleet.tokens.user)).json()["paths"]
        there_are = {(method.upper(), path) for path, methods in paths.items() for method in methods}
        assert there_are - {("GET", "/healthz")} == documented()
        for method, path, able in ROUTES:
            assert http.request(method, path).status_code == 401
            assert http.request(method, path, headers=bearer("nonsense")).status_code == 401
            for role in set(target.tokens) - able:
                assert http.request(method, path, headers=bearer(target.tokens[role])).status_code == 403
