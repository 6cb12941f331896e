"""The rollout API over a queue: accepting, replaying, paging, streaming, cancelling."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollout.board import Heartbeat, ReplicaRole, ReplicaState, RoleSwitch
from rollout.config import RewardEntry
from rollout.errors import IdempotencyConflict, StoreUnavailable
from rollout.memory_queue import MemoryQueue
from rollout.queue import QueueLimits
from rollout.types import Purpose
from services.gateway_app import build_app
from services.sample_stream import as_they_finish
from tests.queue_records import a_request
from tests.unit.gateway_kit import ADMIN, ROLLOUT, Kit, bearer, fleet, heartbeat, kit, scored, until

BODY: dict[str, Any] = {"prompts": ["one two", "three"], "n": 2, "sampling": {"max_tokens": 4, "seed": 9}}


@pytest.fixture
def gateway() -> Kit:
    return kit()


@pytest.fixture
async def http(gateway: Kit) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(gateway) as client:
        yield client


def connect(gateway: Kit) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(gateway.parts), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=bearer(ROLLOUT))


async def submit(http: httpx.AsyncClient, body: Any = BODY, key: str | None = None) -> httpx.Response:
    return await http.post("/v1/rollouts", json=body, headers={"Idempotency-Key": key} if key else {})


async def test_accepted_prompts_are_in_the_queue_as_asked(http: httpx.AsyncClient, gateway: Kit) -> None:
    body = {**BODY, "reward": {"name": "mine", "params": {"k": 1}}, "purpose": "train", "tenant": "t1"}
    answer = await submit(http, {**body, "metadata": [{"a": 1}, {"a": 2}]})
    assert answer.status_code == 202
    assert answer.headers["location"] == answer.json()["links"]["self"]
    leases = await gateway.queues["default"].lease("e", count=9, lease_s=30, purposes=[Purpose.TRAIN])
    assert [lease.group_id for lease in leases] == answer.json()["group_ids"]
    first, second = (lease.request for lease in leases)
    assert (first.prompt_ids, first.prompt_text, first.n) == ((3, 3), "one two", 2)
    assert (first.sampling.max_tokens, first.sampling.seed) == (4, 9)
    assert first.reward is not None
    assert (first.reward.name, dict(first.reward.params), first.tenant) == ("mine", {"k": 1}, "t1")
    assert [dict(first.metadata), dict(second.metadata)] == [{"a": 1}, {"a": 2}]


async def test_a_dataset_is_looked_at_where_the_reward_is_the_built_in_one(http: httpx.AsyncClient) -> None:
    reward = {"name": "reasoning_gym", "params": {"dataset": "spell_backward"}}
    assert (await submit(http, {**BODY, "reward": reward})).status_code == 202
    own = fleet()
    own.rewards.functions["reasoning_gym"] = RewardEntry(function="pkg.mod:fn")
    async with connect(kit(own)) as theirs:
        reward["params"] = {"dataset": "countdown"}
        assert (await submit(theirs, {**BODY, "reward": reward})).status_code == 202


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("a bb", (1, 2)), ([4, 5, 6], (4, 5, 6)), ([{"role": "user", "content": "hey you"}], (6, 3, 3))],
)
async def test_a_prompt_may_be_text_tokens_or_messages(
    http: httpx.AsyncClient, gateway: Kit, prompt: Any, ids: tuple[int, ...]
) -> None:
    assert (await submit(http, {"prompt": prompt})).status_code == 202
    (lease,) = await gateway.queues["default"].lease("e", count=9, lease_s=30, purposes=[Purpose.COLLECT])
    assert lease.request.prompt_ids == ids


async def test_the_same_key_and_body_are_one_submission(http: httpx.AsyncClient, gateway: Kit) -> None:
    first = await submit(http, key="k1")
    again = await http.post(
        "/v1/rollouts",
        content=json.dumps(dict(reversed(BODY.items())), indent=3),
        headers={"Idempotency-Key": "k1", "Content-Type": "application/json; charset=utf-8"},
    )
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == {**first.json(), "replayed": True}
    assert (first.headers["idempotency-replayed"], again.headers["idempotency-replayed"]) == ("false", "true")
    assert (await gateway.queues["default"].ledger()).accepted == 2


async def test_the_same_key_with_another_body_is_a_conflict(http: httpx.AsyncClient, gateway: Kit) -> None:
    await submit(http, key="k1")
    answer = await submit(http, {**BODY, "n": 3}, key="k1")
    assert answer.status_code == 409
    assert "k1" in answer.json()["error"]["message"]
    assert (await gateway.queues["default"].ledger()).accepted == 2


@pytest.mark.parametrize("key", ["feed:default:0", "eval:default:1:start:0:sampled", "http:feed:default:0"])
async def test_a_client_has_no_key_of_the_trainers_and_hears_of_its_own(
    http: httpx.AsyncClient, gateway: Kit, key: str
) -> None:
    first, again = await submit(http, key=key), await submit(http, key=key)
    assert (again.json()["id"], again.json()["replayed"]) == (first.json()["id"], True)
    conflict = (await submit(http, {**BODY, "n": 3}, key=key)).json()["error"]["message"]
    assert conflict.startswith(f"idempotency key '{key}' was used for")
    assert (await gateway.queues["default"].submit([a_request()], idempotency_key=key)).created


async def test_a_key_without_a_colon_is_the_same_in_the_queue(http: httpx.AsyncClient, gateway: Kit) -> None:
    await submit(http, key="k1")
    with pytest.raises(IdempotencyConflict):
        await gateway.queues["default"].submit([a_request()], idempotency_key="k1")


async def test_many_at_once_with_one_key_are_one_submission(http: httpx.AsyncClient, gateway: Kit) -> None:
    answers = await asyncio.gather(*(submit(http, key="same") for _ in range(20)))
    assert {a.status_code for a in answers} == {202}
    assert len({a.json()["id"] for a in answers}) == 1
    assert sum(not a.json()["replayed"] for a in answers) == 1
    assert (await gateway.queues["default"].ledger()).accepted == 2


async def test_a_full_queue_asks_to_come_back() -> None:
    async with connect(kit(queue_limits=QueueLimits(max_depth=3))) as http:
        assert (await submit(http)).status_code == 202
        answer = await submit(http)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "max_depth=3" in answer.json()["error"]["message"]


async def test_another_registered_run_has_its_own_queue(http: httpx.AsyncClient, gateway: Kit) -> None:
    answer = await submit(http, {**BODY, "run": "other"})
    assert answer.json()["id"].startswith("other~")
    assert (await http.get(answer.json()["links"]["self"])).json()["total"] == 2
    assert (await gateway.queues["other"].ledger()).accepted == 2
    assert (await gateway.queues["default"].ledger()).accepted == 0


async def test_states_are_counted_and_groups_paged(http: httpx.AsyncClient, gateway: Kit) -> None:
    link = (await submit(http, {"prompts": ["p"] * 5})).json()["links"]["self"]
    await gateway.finish(count=3)
    view = (await http.get(link, params={"limit": 4})).json()
    assert view["counts"] == {"delivered": 3, "queued": 2}
    assert (view["total"], view["done"], view["next_cursor"]) == (5, False, "4")
    rest = (await http.get(link, params={"limit": 4, "cursor": view["next_cursor"]})).json()
    assert [g["index"] for g in view["groups"] + rest["groups"]] == [0, 1, 2, 3, 4]
    assert rest["next_cursor"] is None


async def test_samples_carry_tokens_logprobs_versions_and_reward(http: httpx.AsyncClient, gateway: Kit) -> None:
    link = (await submit(http)).json()["links"]["samples"]
    await gateway.finish(reward=0.5)
    page = (await http.get(link)).json()
    assert (page["done"], page["next_cursor"], len(page["groups"])) == (True, None, 2)
    assert page["groups"][0]["samples"][1] == {
        "index": 1,
        "text": "answer 1",
        "reward": 0.5,
        "breakdown": {"exact": 0.5},
        "segments": [
            {
                "prompt_ids": [3, 3],
                "response_ids": [4, 5, 6],
                "behavior_logprobs": [-0.5, -0.25, -0.125],
                "version_spans": [{"version": 6, "start": 0, "stop": 1}, {"version": 7, "start": 1, "stop": 3}],
                "finish_reason": "stop",
            }
        ],
    }


async def test_an_empty_page_is_done_when_the_submission_is(http: httpx.AsyncClient, gateway: Kit) -> None:
    link = (await submit(http)).json()["links"]["samples"]
    await gateway.finish(count=1)
    seen = []
    for _ in range(2):
        page = (await http.get(link, params={"cursor": "2"})).json()
        assert (page["groups"], page["next_cursor"]) == ([], None)
        seen.append(page["done"])
        await gateway.finish()
    assert seen == [False, True]


async def test_the_default_of_max_tokens_is_what_the_model_has_room_for(gateway: Kit) -> None:
    async with connect(gateway) as http:
        answer = await submit(http, {"prompts": ["w " * 60, "w"]})
    assert answer.status_code == 202, answer.text
    leases = await gateway.queues["default"].lease("e", count=9, lease_s=30, purposes=[Purpose.COLLECT])
    assert [lease.request.sampling.max_tokens for lease in leases] == [4, 32]


@pytest.mark.parametrize(
    ("params", "accept", "media"),
    [
        ({"stream": "ndjson"}, "*/*", "application/x-ndjson"),
        ({}, "application/x-ndjson", "application/x-ndjson"),
        ({"stream": "sse"}, "*/*", "text/event-stream"),
        ({}, "text/event-stream", "text/event-stream"),
    ],
)
async def test_a_stream_ends_with_every_group_delivered(
    http: httpx.AsyncClient, gateway: Kit, params: dict[str, str], accept: str, media: str
) -> None:
    link = (await submit(http)).json()["links"]["samples"]
    answer, _ = await asyncio.gather(http.get(link, params=params, headers={"Accept": accept}), gateway.finish())
    assert answer.headers["content-type"].startswith(media)
    events = parsed(answer.text, sse="event-stream" in media)
    assert [kind for kind, _ in events] == ["group", "group", "end"]
    assert {data["index"] for _, data in events[:2]} == {0, 1}
    assert events[-1][1] == {"complete": True, "counts": {"delivered": 2}}


def parsed(text: str, *, sse: bool) -> list[tuple[str, dict[str, Any]]]:
    if not sse:
        lines = [json.loads(line) for line in text.splitlines()]
        return [(line.pop("event"), line) for line in lines]
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")]
    return [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]


async def test_groups_are_streamed_in_the_order_in_which_they_finish() -> None:
    queue = MemoryQueue("default")
    gateway = kit(queue=lambda _: queue)
    gateway.queues["default"] = queue
    async with connect(gateway) as http:
        ids = (await submit(http)).json()["group_ids"]
    events = as_they_finish(queue, ids, wait_s=30, clock=lambda: 0.0)
    first, second = await queue.lease("e", count=2, lease_s=30, purposes=[Purpose.COLLECT])
    await queue.complete(second, scored(second, 1.0))
    assert (await anext(events)).data["group_id"] == second.group_id
    await queue.complete(first, scored(first, 1.0))
    assert (await anext(events)).data["group_id"] == first.group_id
    assert (await anext(events)).kind == "end"


async def test_a_stream_that_waited_long_enough_says_it_is_incomplete(http: httpx.AsyncClient) -> None:
    link = (await submit(http)).json()["links"]["samples"]
    answer = await http.get(link, params={"stream": "ndjson", "wait_s": 0.01})
    assert parsed(answer.text, sse=False) == [("end", {"complete": False, "counts": {"queued": 2}})]


async def test_a_silent_stream_sends_heartbeats() -> None:
    queue = MemoryQueue("default")
    gateway = kit(queue=lambda _: queue)
    async with connect(gateway) as http:
        ids = (await submit(http)).json()["group_ids"]
    ticks = iter(range(0, 1000, 6))
    events = [e async for e in as_they_finish(queue, ids, wait_s=20, clock=lambda: next(ticks), heartbeat_s=10)]
    assert [e.kind for e in events] == ["heartbeat", "end"]
    assert events[0].encode("sse").startswith(b":")


async def test_streams_are_bounded_and_give_their_place_back() -> None:
    gateway = kit(fleet(max_streams=1))
    async with connect(gateway) as http:
        link = (await submit(http)).json()["links"]["samples"]
        waiting = asyncio.create_task(http.get(link, params={"stream": "ndjson", "wait_s": 30}))
        await until(lambda: gateway.parts.streams.running == 1)
        refused = await http.get(link, params={"stream": "ndjson"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        await gateway.finish()
        assert (await waiting).status_code == 200
        assert gateway.parts.streams.running == 0
        assert (await http.get(link, params={"stream": "ndjson"})).status_code == 200


async def test_cancelling_ends_what_was_not_generated(http: httpx.AsyncClient, gateway: Kit) -> None:
    link = (await submit(http)).json()["links"]["self"]
    await gateway.finish(count=1)
    answer = await http.delete(link)
    assert (answer.status_code, answer.json()["cancelled"], answer.json()["total"]) == (200, 1, 2)
    assert (await http.get(link)).json()["counts"] == {"delivered": 1, "cancelled": 1}
    assert (await http.delete(link)).json()["cancelled"] == 0
    assert (await gateway.queues["default"].ledger()).balance == 0


async def test_a_deadline_runs_by_the_clock_of_the_queue_and_not_of_the_gateway() -> None:
    now = [1_000_000]  # a server that is decades behind
    queue = MemoryQueue("default", clock=lambda: now[0])
    gateway = kit(queue=lambda _: queue)
    gateway.queues["default"] = queue
    async with connect(gateway) as http:
        links = [(await submit(http, {**BODY, "deadline_s": s})).json()["links"]["self"] for s in (5, 5.001)]
        now[0] += 5_000
        assert await gateway.finish() == 2
        counts = [(await http.get(link)).json()["counts"] for link in links]
    assert counts == [{"dead": 2}, {"delivered": 2}]


@pytest.mark.parametrize("rest", ["", "/samples", "/samples?stream=ndjson"])
async def test_after_retention_results_are_gone_and_not_unknown(rest: str) -> None:
    now = [0]
    queue = MemoryQueue("default", QueueLimits(retain_s=10), lambda: now[0])
    gateway = kit(queue=lambda _: queue)
    gateway.queues["default"] = queue
    async with connect(gateway) as http:
        link = (await submit(http)).json()["links"]["self"]
        await gateway.finish()
        assert (await http.get(link + rest)).status_code == 200
        now[0] = 10_000
        answer = await http.get(link + rest)
    assert answer.status_code == 410
    assert "retain_s" in answer.json()["error"]["message"]


async def test_status_and_metrics_show_fleet_ledger_and_seats(http: httpx.AsyncClient, gateway: Kit) -> None:
    await submit(http)
    await gateway.finish(count=1)
    status = (await http.get("/v1/status", headers=bearer(ADMIN))).json()
    assert status["seats"] == {"total": 8, "users": 1, "rollouts": 5, "free": 2}
    assert (status["current_version"], status["durability"], status["replicas_seen"]) == (7, "always", 1)
    assert status["min_replicas"] == gateway.parts.fleet.autoscaling.min_replicas
    assert status["replicas"][0]["version"] == 7
    ledger = status["runs"]["default"]["ledger"]
    assert (ledger["accepted"], ledger["delivered"], ledger["pending"], ledger["balance"]) == (2, 1, 1, 0)
    assert set(status["runs"]) == {"default", "other"}
    page = (await http.get("/metrics", headers=bearer(ADMIN))).text
    assert 'nightshift_groups{run="default",state="delivered"} 1.0' in page
    assert 'nightshift_queue_depth{purpose="collect",run="default",state="queued"} 1.0' in page
    assert 'nightshift_replica_user_failures{replica="r1"} 2.0' in page
    seats = {"total": 8, "users": 1, "rollouts": 5, "sitting_out": 2}
    assert all(f'nightshift_seats{{replica="r1",use="{use}"}} {seats[use]}.0' in page for use in seats)
    assert "nightshift_user_ttft_seconds_bucket" in page


async def test_free_seats_of_one_replica_are_not_lost_to_the_queue_of_another(
    http: httpx.AsyncClient, gateway: Kit
) -> None:
    crowded = replace(heartbeat("r2"), seats_users=40)
    dead = heartbeat("r3", ReplicaState.DEAD)
    gateway.board.replicas_alive = [heartbeat("r1"), crowded, dead]
    seats = (await http.get("/v1/status", headers=bearer(ADMIN))).json()["seats"]
    assert seats == {"total": 16, "users": 41, "rollouts": 10, "free": 2}


async def test_roles_and_what_their_changes_took_are_shown(http: httpx.AsyncClient, gateway: Kit) -> None:
    switches = [RoleSwitch(ReplicaRole.SERVING, 5.0, {"seen": 0.1, "verified": seconds}) for seconds in (9.0, 2.0)]
    lent = replace(heartbeat("r2"), role=ReplicaRole.ROLLOUT, switches=tuple(switches), lends=3, reclaims=2)
    gateway.board.replicas_alive = [heartbeat("r1"), lent]
    page = (await http.get("/metrics", headers=bearer(ADMIN))).text
    assert 'nightshift_replica_role{replica="r2",role="rollout"} 1.0' in page
    assert 'nightshift_replica_switches{replica="r2",to="serving"} 2.0' in page
    assert 'nightshift_replica_switch_seconds{part="verified",replica="r2",to="serving"} 2.0' in page
    assert 'replica="r1",role' not in page
    gateway.board.replicas_alive = [lent]
    assert (await http.get("/healthz")).status_code == 503


async def test_health_needs_a_replica_that_answers(http: httpx.AsyncClient, gateway: Kit) -> None:
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.head("/healthz", headers={"Authorization": ""})).status_code == 200
    gateway.board.replicas_alive.clear()
    answer = await http.head("/healthz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    answer = await http.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (503, "no replica ready")
    assert answer.headers["retry-after"] == "5"


async def test_users_who_need_no_store_are_not_sent_away_while_it_does_not_answer(
    http: httpx.AsyncClient, gateway: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(fleet: str) -> list[Heartbeat]:
        raise StoreUnavailable(fleet)

    async def asked() -> tuple[int, str]:
        answer = await http.get("/healthz")
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        return answer.status_code, answer.json()["status"]

    with monkeypatch.context() as outage:
        outage.setattr(gateway.board, "replicas", away)
        assert await asked() == (503, "store unavailable")
    assert await asked() == (200, "ok")
    monkeypatch.setattr(gateway.board, "replicas", away)
    assert await asked() == (200, "store unavailable")


async def test_a_page_holds_no_more_groups_than_its_tokens_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout_api._PAGE_OF_TOKENS", 7)
    gateway = kit()
    async with connect(gateway) as http:
        link = (await submit(http, {"prompts": ["a", "b", "c"], "n": 2})).json()["links"]["samples"]
        await gateway.finish()
        pages, cursor = [], "0"
        while cursor is not None:
            page = (await http.get(link, params={"cursor": cursor})).json()
            pages.append([group["index"] for group in page["groups"]])
            cursor = page["next_cursor"]
    assert pages == [[0], [1], [2]]
