"""Requests that a gateway has to refuse, as bytes of HTTP: the same ones for the same seed.

noise            a body that is no JSON, or JSON of no body that a route takes
wrong_value      a body that is right but for one field
huge_field       one field that is far too large, in a body that is not
oversize         a body beyond the limit, said at once or found out
bad_header       headers that are too many, too long, contradict each other, or are no text
bad_token        no token, a wrong one, or that of another role
unknown_route    paths, ids and models that are not there
bad_method       a method that the route does not have, or nobody
bad_query        parameters of a query that are none
malformed        what is no HTTP
truncated        a request that breaks off in its head or body as its client leaves
abandoned        a whole request, a good one at times, whose client leaves at once
"""

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.api_routes import ROUTES

NO_ANSWER = 0
"""Stands for a connection that is closed instead of an answer."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "texts": (str, list),
    "list": (list,),
    "object": (dict,),
    "objects": (dict, list),
    "switch": (bool,),
    "whole": (int,),
    "number": (int, float),
}
# fmt: off
_OF_BOTH = {
    "model": "text", "n": "whole", "stream": "switch", "stream_options": "object", "temperature": "number",
    "top_p": "number", "top_k": "whole", "min_p": "number", "stop": "texts", "stop_token_ids": "list",
    "seed": "whole", "presence_penalty": "number", "frequency_penalty": "number", "logit_bias": "object",
    "repetition_penalty": "number", "min_tokens": "whole", "ignore_eos": "switch", "response_format": "object",
    "cache_salt": "text", "user": "text", "max_tokens": "whole",
}
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {**_OF_BOTH, "prompt": "texts", "logprobs": "whole", "echo": "switch", "suffix": "text"},
    "/v1/chat/completions": {
        **_OF_BOTH,
        "messages": "list", "logprobs": "switch", "top_logprobs": "whole", "tools": "list",
        "chat_template_kwargs": "object",
    },
    "/v1/rollouts": {
        "prompts": "list", "n": "whole", "sampling": "object", "reward": "object", "purpose": "text",
        "metadata": "objects", "run": "text", "tenant": "text", "deadline_s": "number",
    },
}
"""Of each body, with what a value may be."""
_OUT_OF_RANGE: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "/v1/completions": {
        "prompt": ["", [], [[]], [-1], [2**40], ["a", 1], [{"a": 1}]], "n": [0, -1, 10**6], "best_of": [7],
        "max_tokens": [-1, 10**9], "temperature": [-1, 2.5], "top_p": [0, 1.5], "logprobs": [-1, 10**4],
        "stop": [["a"] * 17, "a" * 257], "cache_salt": ["", "@", "/" * 10], "logit_bias": [{"a": "b"}],
        "model": ["", "gpt-9", "\u0000", "../policy"],
    },
    "/v1/chat/completions": {
        "messages": [[], [{}], [1], [{"role": ""}], [{"role": "user", "content": 5}], [[{"role": "user"}]]],
        "tools": [[1], [{"type": "function", "function": {"name": "f"}}] * 129],
        "chat_template_kwargs": [{"tokenize": True}, {"chat_template": "{{ 1 }}"}],
        "modalities": [["audio"]],
    },
    "/v1/rollouts": {
        "prompts": [[], [""], [[]], [{"role": "user"}], [[2**31]]], "n": [0, -3, 10**6], "purpose": ["", "test"],
        "sampling": [{"max_tokens": 0}, {"temperature": 1e-9}, {"best_of": 2}], "reward": [{"name": "nobody"}],
        "run": ["no/run", "x" * 100, "unknown"], "deadline_s": [0, -1, 1e12], "metadata": [[{}, {}, {}]],
    },
}
# fmt: on
_METHODS = ("PUT", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND", "BREW", "get", "DELETE")
_JSON = (("Content-Type", "application/json"),)
_REFUSED = frozenset({400, 422})


@dataclass(frozen=True, slots=True)
class Target:
    """What is known of the gateway that gets them."""

    tokens: Mapping[str, str]
    """By role."""
    model: str
    max_body_bytes: int
    """Of its proxy."""


@dataclass(frozen=True, slots=True)
class BadRequest:
    """One of them."""

    kind: str
    pieces: tuple[bytes, ...]
    """Written one after the other."""
    statuses: frozenset[int]
    """That its answer may have."""
    leaves: bool = False
    """Whether the client closes the connection instead of waiting for an answer."""


def bad_requests(seed: int, target: Target) -> Iterator[BadRequest]:
    """Without an end, every kind among them.

    >>> target = Target({role: role for role in ("user", "rollout", "admin", "metrics")}, "policy", 10_000)
    >>> first, again = (next(bad_requests(7, target)) for _ in range(2))
    >>> first == again
    True
    """
    random = Random(seed)
    kinds, weights = zip(*_KINDS.items(), strict=True)
    while True:
        (make,) = random.choices(kinds, weights)
        yield make(random, target)


def _noise(random: Random, target: Target) -> BadRequest:
    bodies: list[bytes] = [
        random.randbytes(random.randrange(200)),
        b"",
        b"[" * random.randrange(65, 5000),
        b'{"a":' * 5000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * random.randrange(20, 5000) + b"}",
        b'{"prompt": NaN}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        _json(random.choice([None, 1, 1.5, True, "text", [], [{}]])),
        _json(_good(random.choice(list(_FIELDS)), target))[: random.randrange(1, 20)],
    ]
    return BadRequest("noise", (_post(random, target, random.choice(bodies)),), _REFUSED)


def _wrong_value(random: Random, target: Target) -> BadRequest:
    path = random.choice(list(_FIELDS))
    body = _good(path, target)
    way = random.randrange(3)
    if way == 0:
        field, accepted = random.choice(list(_FIELDS[path].items()))
        body[field] = _of_another_type(random, _TYPES[accepted])
    elif way == 1:
        field, values = random.choice(list(_OUT_OF_RANGE[path].items()))
        body[field] = random.choice(values)
    else:
        body["x-" + _word(random)] = _tree(random, depth=5)
    statuses = _REFUSED | {404}  # a model that is not there
    return BadRequest("wrong_value", (_post(random, target, _json(body), path),), statuses)


def _huge_field(random: Random, target: Target) -> BadRequest:
    size = min(int(2 ** random.uniform(16, 20)), target.max_body_bytes - 2_000)
    many = size // 12
    path, field, value = random.choice([
        ("/v1/completions", "prompt", "x" * size),
        ("/v1/completions", "prompt", [1] * (size // 3)),
        ("/v1/completions", "prompt", ["a"] * (size // 5)),
        ("/v1/completions", "model", "m" * size),
        ("/v1/completions", "stop", ["a"] * (size // 5)),
        ("/v1/completions", "user", "é" * (size // 6)),
        ("/v1/completions", "logit_bias", {str(i): 0 for i in range(many)}),
        ("/v1/completions", "_" * size, 1),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * size}]),
        ("/v1/chat/completions", "tools", [{}] * (size // 4)),
        ("/v1/completions", "response_format", {"type": "json_schema", "json_schema": {"enum": ["a"] * (size // 5)}}),
        ("/v1/chat/completions", "response_format", {"type": "structural_tag", "format": "x" * size}),
        ("/v1/rollouts", "prompts", ["a"] * (size // 5)),
        ("/v1/rollouts", "metadata", {"a": "x" * size}),
        ("/v1/rollouts", "reward", {"name": "exact_match", "params": {"a": [0] * (size // 3)}}),
        ("/v1/rollouts", "tenant", "t" * size),
    ])  # fmt: skip
    body = {**_good(path, target), field: value}
    return BadRequest("huge_field", (_post(random, target, _json(body), path),), _REFUSED | {404})


def _oversize(random: Random, target: Target) -> BadRequest:
    path = random.choice(list(_FIELDS))
    if random.random() < 0.9:
        over = target.max_body_bytes + random.randrange(1, 10**9)
        head = _head("POST", path, [*_JSON, *_bearer(target.tokens["admin"]), ("Content-Length", str(over))])
        return BadRequest("oversize", (head + b"x" * random.randrange(5000),), frozenset({413}))
    head = _head("POST", path, [*_JSON, *_bearer(target.tokens["admin"]), ("Transfer-Encoding", "chunked")])
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    chunks = [chunk] * (target.max_body_bytes // 0x4000 + 2)
    return BadRequest("oversize", (head, *chunks, b"0\r\n\r\n"), frozenset({413}))


def _bad_header(random: Random, target: Target) -> BadRequest:
    body = _json(_good("/v1/rollouts", target))
    length = ("Content-Length", str(len(body)))
    headers, status = random.choice([
        ([("Content-Type", _word(random)), length], 415),
        ([length], 415),
        ([*_JSON, length, *[(f"X-{i}", "a") for i in range(random.randrange(100, 400))]], 431),
        ([*_JSON, length, ("X-Long", "a" * random.randrange(33_000, 36_000))], 431),
        ([*_JSON, length, ("Content-Length", "0")], 400),
        ([*_JSON, length, ("Transfer-Encoding", "chunked")], 400),
        ([*_JSON, ("Content-Length", random.choice(["-1", "abc", "0x10", "1e3", "9" * 40]))], 400),
        ([*_JSON, length, ("Idempotency-Key", random.choice(["", "k" * 300, "caf\xe9"]))], 422),
        ([*_JSON, length, (_word(random) + " ", "a")], 400),
    ])  # fmt: skip
    head = _head("POST", "/v1/rollouts", [*_bearer(target.tokens["rollout"]), *headers])
    return BadRequest("bad_header", (head + body,), frozenset({status, 400, 413, 431}))


def _bad_token(random: Random, target: Target) -> BadRequest:
    method, path, able = random.choice(ROUTES)
    others = sorted(set(target.tokens) - set(able))
    if others and random.random() < 0.5:
        credentials, status = _bearer(target.tokens[random.choice(others)]), 403
    else:
        right = target.tokens[min(able)]
        value = random.choice([
            *(None, "", "Bearer", "Bearer ", f"Basic {right}", right, f"Bearer {right}x", f"Bearer {right[:-1]}"),
            *("Bearer caf\xe9", "Bearer " + "a" * 20_000, f"Bearer {right} {right}", f"Token {right}"),
        ])  # fmt: skip
        credentials, status = [] if value is None else [("Authorization", value)], 401
    body = _json(_good(path, target)) if method == "POST" else b""
    sent = _request(method, path, [*_JSON, *credentials], body)
    return BadRequest("bad_token", (sent,), frozenset({status}))


def _unknown_route(random: Random, target: Target) -> BadRequest:
    word = _word(random)
    path, status = random.choice([
        (f"/{word}", 404),
        (f"/v1/{word}", 404),
        ("/v1/completions/", 404),
        ("//v1/models", 404),
        ("/v1/../metrics", 404),
        ("/v1/%2e%2e/metrics", 404),
        ("/%00", 404),
        (f"/%{random.randrange(128, 256):02x}", 404),
        ("/-/routes", 404),
        (f"/v1/models/{word}", 404),
        (f"/v1/rollouts/{word}", 404),
        (f"/v1/rollouts/{word}~{word}/samples", 404),
        (f"/v1/rollouts/default~{word}", 404),
        ("/" + "a" * random.randrange(9_000, 40_000), 414),
        *((f"/{name}", 404) for name in ("reset_prefix_cache", "collective_rpc", "v1/embeddings", "api/serve")),
    ])  # fmt: skip
    sent = _request("GET", path, _bearer(target.tokens["admin"]))
    return BadRequest("unknown_route", (sent,), frozenset({status}))


def _bad_method(random: Random, target: Target) -> BadRequest:
    _, path, _ = random.choice([route for route in ROUTES if route[0] != "DELETE" and "~" not in route[1]])
    method = random.choice(_METHODS)
    body = b"" if method == "HEAD" else _json(_good("/v1/completions", target))
    sent = _request(method, path, [*_JSON, *_bearer(target.tokens["admin"])], body)
    return BadRequest("bad_method", (sent,), frozenset({400, 404, 405}))


def _bad_query(random: Random, target: Target) -> BadRequest:
    query = random.choice([
        *("limit=0", "limit=-1", "limit=a", "limit=1.5", "limit=%ff"),
        *("stream=csv", "stream=", "stream=%00", "wait_s=nan", "wait_s=-1", "wait_s=1e400", "wait_s="),
    ])  # fmt: skip
    sent = _request("GET", f"/v1/rollouts/default~0/samples?{query}", _bearer(target.tokens["rollout"]))
    return BadRequest("bad_query", (sent,), frozenset({422}))


def _malformed(random: Random, target: Target) -> BadRequest:
    chunked = [*_JSON, *_bearer(target.tokens["user"]), ("Transfer-Encoding", "chunked")]
    sent = random.choice([
        b"\x16\x03\x01" + random.randbytes(random.randrange(200)),  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n folded: a\r\n: b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _word(random).encode() + b"\r\n\r\n",
        _head("POST", "/v1/completions", chunked) + b"zz\r\n" + random.randbytes(20),
        _head("POST", "/v1/completions", chunked) + b"-5\r\nhello\r\n",
        _head("POST", "/v1/completions", chunked) + b"f" * 40 + b"\r\n",
    ])  # fmt: skip
    return BadRequest("malformed", (sent,), frozenset({400, 404, NO_ANSWER}))


def _truncated(random: Random, target: Target) -> BadRequest:
    path = random.choice(list(_FIELDS))
    sent = _post(random, target, _json(_good(path, target)), path)
    return BadRequest("truncated", (sent[: random.randrange(1, len(sent))],), frozenset(), leaves=True)


def _abandoned(random: Random, target: Target) -> BadRequest:
    if random.random() < 0.25:
        body = {**_good("/v1/completions", target), "max_tokens": 4, "stream": random.random() < 0.5}
        sent = _post(random, target, _json(body), "/v1/completions")
    else:
        method, path, _ = random.choice([route for route in ROUTES if route[0] == "GET"])
        sent = _request(method, path, _bearer(target.tokens["admin"]))
    return BadRequest("abandoned", (sent,), frozenset(), leaves=True)


_KINDS: Mapping[Callable[[Random, Target], BadRequest], int] = {
    _noise: 14,
    _wrong_value: 20,
    _huge_field: 4,
    _oversize: 2,
    _bad_header: 12,
    _bad_token: 14,
    _unknown_route: 8,
    _bad_method: 6,
    _bad_query: 4,
    _malformed: 4,
    _truncated: 6,
    _abandoned: 6,
}
"""With how often each comes."""


def _good(path: str, target: Target) -> dict[str, Any]:
    """A body that the route takes."""
    if path == "/v1/rollouts":
        return {"prompts": ["a"], "n": 1, "sampling": {"max_tokens": 1}, "metadata": {}}
    if path == "/v1/chat/completions":
        return {"model": target.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    return {"model": target.model, "prompt": "a", "max_tokens": 1}


def _of_another_type(random: Random, accepted: tuple[type, ...]) -> Any:
    """Never null, by which a field is left out."""
    values = [
        _word(random),
        random.randrange(10**6),
        random.random(),
        True,
        [_tree(random, 3)],
        {"a": _tree(random, 3)},
    ]
    return random.choice([value for value in values if type(value) not in accepted])


def _tree(random: Random, depth: int) -> Any:
    """JSON of whatever."""
    if depth and random.random() < 0.6:
        inner = [_tree(random, depth - 1) for _ in range(random.randrange(4))]
        return inner if random.random() < 0.5 else {_word(random): value for value in inner}
    return random.choice([None, True, -1, 1.5, "", _word(random), "\u0000", "😀"])


def _word(random: Random) -> str:
    return "".join(random.choices(string.ascii_lowercase, k=random.randrange(3, 12)))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _post(random: Random, target: Target, body: bytes, path: str | None = None) -> bytes:
    """To that path or any that takes a body, with a token that may."""
    role = random.choice(("rollout", "admin"))
    return _request("POST", path or random.choice(list(_FIELDS)), [*_JSON, *_bearer(target.tokens[role])], body)


def _request(method: str, path: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"") -> bytes:
    return _head(method, path, [*headers, ("Content-Length", str(len(body)))]) + body


def _head(method: str, path: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _bearer(token: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {token}")]
