"""The gateway in front of a real engine: unchanged OpenAI clients, rollouts by HTTP, and no other door."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from rollout.client import RolloutClient
from tests.plain_http import DIRECT
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def user(fleet: RunningFleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key=fleet.tokens.user, http_client=httpx.Client(**DIRECT), max_retries=0
    ) as client:
        yield client


@pytest.fixture
def model(user: openai.OpenAI) -> str:
    (card,) = user.models.list().data
    return card.id


def test_completions_whole_and_streamed(user: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0}
    whole = user.completions.create(**asked, stream=False)  # type: ignore[call-overload]
    pieces = list(user.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert whole.usage.completion_tokens <= 8
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text


def test_chat_whole_and_streamed(user: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    whole = user.chat.completions.create(**asked, stream=False)  # type: ignore[call-overload]
    pieces = list(user.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert said == whole.choices[0].message.content


def test_a_stream_begins_with_its_first_token_alone(fleet: RunningFleet, model: str) -> None:
    asked = {"model": model, "prompt": "the quick brown fox", "max_tokens": 64, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=fleet.url, timeout=60, **DIRECT) as client:

        def first_piece() -> int:
            headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
            with client.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
                pieces = list(answer.iter_raw())
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
            return pieces[0].count(b'"choices"')

        # another process may have held this one up for a moment, so that it finds more
        assert min(first_piece() for _ in range(5)) <= 2


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 40), (8, 40)])
def test_what_a_replica_tells_of_an_answer_reaches_no_client(
    fleet: RunningFleet, model: str, sequences: int, tokens: int
) -> None:
    asked = {
        "model": model,
        "prompt": "the quick brown fox",
        "n": sequences,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=asked, headers=headers, timeout=60, **DIRECT)
    assert all(event.startswith("data: ") for event in answer.text.split("\n\n")[:-1])
    assert f'"completion_tokens":{sequences * tokens}' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_gateway_knows_what_of_a_first_token_was_not_the_engines(
    fleet: RunningFleet, model: str, route: str
) -> None:
    def way_ms() -> float:
        headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
        return float(httpx.get(f"{fleet.url}/v1/status", headers=headers, **DIRECT).json()["users"]["way_ms"])

    prompt = {"prompt": "hello"} if route == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    asked = {"model": model, "max_tokens": 8, "ignore_eos": True, "stream": True, **prompt}
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    began = time.monotonic()
    for _ in range(70):  # as many as are remembered, so that none is another route's
        answer = httpx.post(f"{fleet.url}/v1/{route}", json=asked, headers=headers, timeout=60, **DIRECT)
        assert ": engine" not in answer.text
        assert answer.text.startswith("data: {")
    assert 0 < way_ms() < 1000 * (time.monotonic() - began) / 10


def test_a_client_without_limits_of_its_own_is_served(user: openai.OpenAI, model: str) -> None:
    answer = user.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_hints_and_template_variables_of_a_client_are_taken(user: openai.OpenAI, model: str) -> None:
    answer = user.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="someone",
        modalities=["text"],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_the_logprobs_of_a_prompt_alone_are_answered(user: openai.OpenAI, model: str) -> None:
    answer = user.completions.create(
        model=model, prompt=[5, 6, 7, 8], max_tokens=0, echo=True, logprobs=1, best_of=1, n=1
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    first, *others = choice.logprobs.token_logprobs or ()
    assert first is None
    assert len(others) == 3
    assert all(logprob is not None and logprob <= 0 for logprob in others)


def test_refusals_reach_the_client_as_its_own_errors(user: openai.OpenAI, model: str, fleet: RunningFleet) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        user.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match=str(fleet.config.engine.max_model_len)):
        user.completions.create(model=model, prompt="fox " * 2000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        user.completions.create(model=model, prompt="a", max_tokens=10**6)
    with pytest.raises(openai.AuthenticationError):
        user.with_options(api_key="wrong").models.list()


_CHAT_REFUSALS: list[tuple[dict[str, object], str]] = [
    ({"top_logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "structural_tag"),
    ({"response_format": {"type": 7}}, "response_format"),
    ({"tool_choice": "required"}, "tools"),
    ({"tool_choice": {"type": "function"}}, "tools"),
    ({"tool_choice": {"type": "function"}, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool"),
]
_COMPLETION_REFUSALS: list[tuple[dict[str, object], str]] = [
    ({"stream_options": {"include_usage": True}}, "stream"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "structural_tag"),
]


@pytest.mark.parametrize(("extra", "named"), _CHAT_REFUSALS)
def test_what_only_the_engine_can_check_of_a_chat_is_refused_too(
    user: openai.OpenAI, model: str, extra: dict[str, object], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        user.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4, extra_body=extra
        )


@pytest.mark.parametrize(("extra", "named"), _COMPLETION_REFUSALS)
def test_what_only_the_engine_can_check_of_a_completion_is_refused_too(
    user: openai.OpenAI, model: str, extra: dict[str, object], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        user.completions.create(model=model, prompt="hello", max_tokens=4, extra_body=extra)


def test_rollouts_by_http_are_generated_scored_and_streamed(fleet: RunningFleet) -> None:
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = client.submit(
            ["the quick", [{"role": "user", "content": "hello"}], [5, 6, 7]],
            n=4,
            sampling={"max_tokens": 6},
            reward={"name": "vowels"},
            metadata={"who": "test"},
        )
        groups = list(client.stream(rollout.id, wait_s=240))
        assert {g.index for g in groups} == {0, 1, 2}
        assert client.get(rollout.id).counts == {"delivered": 3}
    for sample in (s for g in groups for s in g.samples):
        (segment,) = sample.segments
        assert len(segment.response_ids) == len(segment.behavior_logprobs)
        assert all(logprob <= 0 for logprob in segment.behavior_logprobs)
        assert segment.version_spans[0][1] == 0
        assert segment.version_spans[-1][2] == len(segment.response_ids)


def test_bytes_that_are_no_text_are_refused_by_serve_or_by_the_gateway(fleet: RunningFleet) -> None:
    address = ("127.0.0.1", fleet.config.gateway.port)
    rest = b"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    requests = {
        b"GET /nothing?\xff " + rest: (b"400", b"404"),
        b"GET /nothing?%ff " + rest: (b"404",),
        b"GET /%ff%fe " + rest: (b"404",),
        b"GET /v1/models " + rest + b"Authorization: Bearer \xff\r\n": (b"400", b"401"),
    }
    for request, statuses in requests.items():
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(request + b"\r\n")
            with connection.makefile("rb") as answer:
                assert answer.readline().split()[1] in statuses, request


def test_status_and_health_show_the_engine(fleet: RunningFleet) -> None:
    assert httpx.get(f"{fleet.url}/healthz", **DIRECT).status_code == 200
    with RolloutClient(fleet.url, fleet.tokens.admin) as client:
        status = client.status()
    assert status["seats"]["total"] >= fleet.config.engine.max_num_seqs
    assert status["durability"] == "always"
    assert all(run["ledger"]["balance"] == 0 for run in status["runs"].values())


def test_no_process_reports_on_what_is_served(fleet: RunningFleet) -> None:
    found = []
    for process in psutil.Process(fleet.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline()))
    assert any("ServeController" in line for line in found), "the scan must see Ray's actors, or it sees nothing"
    assert [line for line in found if "Telemetry" in line] == []


def listening_ports(pid: int) -> set[tuple[str, int]]:
    root = psutil.Process(pid)
    found = set()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def serves_models(host: str, port: int, token: str) -> bool:
    """Whether OpenAI routes answer there, with or without a token."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    for headers in ({}, {"Authorization": f"Bearer {token}"}):
        try:
            answer = httpx.get(f"http://{host}:{port}/v1/models", headers=headers, timeout=3, **DIRECT).json()
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(answer, dict) and answer.get("object") == "list":
            return True
    return False


def test_no_other_port_of_the_fleet_answers_like_an_engine(fleet: RunningFleet) -> None:
    ports = listening_ports(fleet.pid)
    gateway = fleet.config.gateway.port
    assert gateway in {port for _, port in ports}, "the scan must see the gateway, or it sees nothing"
    with ThreadPoolExecutor(len(ports)) as pool:
        answers = pool.map(lambda address: serves_models(*address, fleet.tokens.admin), ports)
        assert {port for (_, port), serves in zip(ports, answers, strict=True) if serves} == {gateway}
