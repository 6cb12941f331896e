"""Typed client of the gateway's rollout API, synchronous and asynchronous.

    with RolloutClient("http://127.0.0.1:8000", token) as client:
        rollout = client.submit(["doorlike ->\\n"], n=8, sampling={"max_tokens": 13})
        for group in client.stream(rollout.id):
            print(group.index, [sample.reward for sample in group.samples])

Refusals are raised as the errors of `rollout.errors`: NotFound, Gone, QueueFull, IdempotencyConflict, StoreUnavailable
(also when the gateway itself does not answer), and `Refused` for everything else. Submissions carry an Idempotency-Key,
so one that is sent again because its answer was lost has its effect once.
"""

import asyncio
import json
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

import httpx
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception_type, stop_after_delay

from rollout.client_records import Rollout, RolloutStatus, SampledGroup
from rollout.errors import Gone, IdempotencyConflict, NightshiftError, NotFound, QueueFull, StoreUnavailable
from rollout.text_lines import async_text_lines, text_lines

DEFAULT_RETRY_S = 60.0
_LONGEST_PAUSE_S = 10.0
_LONGEST_WAIT_S = 600.0
"""Of one connection; a stream goes on over several."""
_RETRIED = (QueueFull, StoreUnavailable)
_ROLLOUTS = "/v1/rollouts"


class Refused(NightshiftError, ValueError):
    """The gateway refused the request; the message names field, value and limit."""

    def __init__(self, message: str, *, status: int, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Unreachable(StoreUnavailable):
    """The gateway, or the store behind it, does not answer; worth another try after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RolloutClient:
    """Blocking client; close it, or use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        retry_s: float = DEFAULT_RETRY_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`retry_s` bounds how long lost connections, 429 and 503 are retried."""
        self._http = httpx.Client(transport=transport, **_settings(base_url, token))
        self._retry_s = retry_s

    def submit(self, prompts: Sequence[Any], *, idempotency_key: str | None = None, **fields: Any) -> Rollout:
        """Queue prompts (texts, message lists or token id lists); `fields` are those of POST /v1/rollouts."""
        return Rollout.of(self._send("POST", _ROLLOUTS, **_submission(prompts, idempotency_key, fields)))

    def get(self, rollout_id: str) -> RolloutStatus:
        """Counts by state."""
        return RolloutStatus.of(self._send("GET", f"{_ROLLOUTS}/{rollout_id}", params={"limit": 1}))

    def samples(self, rollout_id: str, *, limit: int | None = None) -> Iterator[SampledGroup]:
        """All groups in the order of the prompts, finished or not, page by page."""
        cursor: str | None = "0"
        while cursor is not None:
            asked = {"cursor": cursor, **({} if limit is None else {"limit": limit})}
            page = self._send("GET", f"{_ROLLOUTS}/{rollout_id}/samples", params=asked)
            yield from map(SampledGroup.of, page["groups"])
            cursor = page["next_cursor"]

    def stream(self, rollout_id: str, *, wait_s: float | None = 600.0) -> Iterator[SampledGroup]:
        """Each group once, as it finishes; connects again when cut off.

        Raises TimeoutError after `wait_s` (None: never), StoreUnavailable or QueueFull after `retry_s` without contact.
        """
        progress = _StreamProgress(rollout_id, wait_s, self._retry_s)
        while not progress.complete:
            try:
                with self._http.stream("GET", f"{_ROLLOUTS}/{rollout_id}/samples", **progress.request()) as response:
                    if response.is_error:
                        response.read()
                    _raise_refusal(response)
                    for line in text_lines(response.iter_bytes()):
                        yield from progress.read(line)
            except (httpx.TransportError, Refused, *_RETRIED) as error:
                progress.failed(error)
            if not progress.complete:
                time.sleep(progress.pause_s())

    def cancel(self, rollout_id: str) -> int:
        """How many groups were cancelled."""
        return int(self._send("DELETE", f"{_ROLLOUTS}/{rollout_id}")["cancelled"])

    def status(self) -> dict[str, Any]:
        """/v1/status; needs the admin role."""
        return self._send("GET", "/v1/status")

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            try:
                return _answer(self._http.request(method, path, **arguments))
            except httpx.TransportError as error:
                raise _unreachable(error) from error

        return Retrying(**_retrying(self._retry_s))(once)


class AsyncRolloutClient:
    """The same for asyncio."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        retry_s: float = DEFAULT_RETRY_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`retry_s` bounds how long lost connections, 429 and 503 are retried."""
        self._http = httpx.AsyncClient(transport=transport, **_settings(base_url, token))
        self._retry_s = retry_s

    async def submit(self, prompts: Sequence[Any], *, idempotency_key: str | None = None, **fields: Any) -> Rollout:
        """Queue prompts (texts, message lists or token id lists); `fields` are those of POST /v1/rollouts."""
        return Rollout.of(await self._send("POST", _ROLLOUTS, **_submission(prompts, idempotency_key, fields)))

    async def get(self, rollout_id: str) -> RolloutStatus:
        """Counts by state."""
        return RolloutStatus.of(await self._send("GET", f"{_ROLLOUTS}/{rollout_id}", params={"limit": 1}))

    async def samples(self, rollout_id: str, *, limit: int | None = None) -> AsyncIterator[SampledGroup]:
        """All groups in the order of the prompts, finished or not, page by page."""
        cursor: str | None = "0"
        while cursor is not None:
            asked = {"cursor": cursor, **({} if limit is None else {"limit": limit})}
            page = await self._send("GET", f"{_ROLLOUTS}/{rollout_id}/samples", params=asked)
            for group in page["groups"]:
                yield SampledGroup.of(group)
            cursor = page["next_cursor"]

    async def stream(self, rollout_id: str, *, wait_s: float | None = 600.0) -> AsyncIterator[SampledGroup]:
        """Each group once, as it finishes; connects again when cut off.

        Raises TimeoutError after `wait_s` (None: never), StoreUnavailable or QueueFull after `retry_s` without contact.
        """
        progress = _StreamProgress(rollout_id, wait_s, self._retry_s)
        while not progress.complete:
            try:
                path = f"{_ROLLOUTS}/{rollout_id}/samples"
                async with self._http.stream("GET", path, **progress.request()) as response:
                    if response.is_error:
                        await response.aread()
                    _raise_refusal(response)
                    async for line in async_text_lines(response.aiter_bytes()):
                        for group in progress.read(line):
                            yield group
            except (httpx.TransportError, Refused, *_RETRIED) as error:
                progress.failed(error)
            if not progress.complete:
                await asyncio.sleep(progress.pause_s())

    async def cancel(self, rollout_id: str) -> int:
        """How many groups were cancelled."""
        return int((await self._send("DELETE", f"{_ROLLOUTS}/{rollout_id}"))["cancelled"])

    async def status(self) -> dict[str, Any]:
        """/v1/status; needs the admin role."""
        return await self._send("GET", "/v1/status")

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        async def once() -> dict[str, Any]:
            try:
                return _answer(await self._http.request(method, path, **arguments))
            except httpx.TransportError as error:
                raise _unreachable(error) from error

        return await AsyncRetrying(**_retrying(self._retry_s))(once)


class _StreamProgress:
    """What a stream has delivered, across connections."""

    def __init__(self, rollout_id: str, wait_s: float | None, retry_s: float) -> None:
        self.complete = False
        self._rollout_id = rollout_id
        self._wait_s = math.inf if wait_s is None else wait_s
        self._retry_s = retry_s
        self._deadline = time.monotonic() + self._wait_s
        self._longest_s = _LONGEST_WAIT_S
        self._asked_s = 0.0
        self._lost_since: float | None = None
        self._seen: set[str] = set()
        self._last: Exception | None = None

    def request(self) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            message = (
                f"rollout {self._rollout_id}: not complete after {self._wait_s:g} s, {len(self._seen)} groups came"
            )
            raise TimeoutError(message) from self._last
        # a heartbeat comes every ten seconds, so a longer silence is a dead connection
        self._asked_s = min(left, self._longest_s)
        return {"params": {"stream": "ndjson", "wait_s": self._asked_s}, "timeout": httpx.Timeout(35.0, connect=5.0)}

    def read(self, line: str) -> Iterator[SampledGroup]:
        if not line.strip():
            return
        event = json.loads(line)
        if "reason" in event and event["event"] == "end":
            raise Unreachable(str(event["reason"]))
        self._lost_since = self._last = None
        if event["event"] == "group" and event["group_id"] not in self._seen:
            self._seen.add(event["group_id"])
            yield SampledGroup.of(event)
        elif event["event"] == "end":
            self.complete = bool(event["complete"])

    def failed(self, error: Exception) -> None:
        """Raises it where another try makes no sense, or none has helped for `retry_s`."""
        if isinstance(error, Refused):
            if error.param != "wait_s":
                raise error
            # the operator's limit is lower, by how much is not known here
            self._longest_s = self._asked_s / 2
            return
        self._last = _unreachable(error) if isinstance(error, httpx.TransportError) else error
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since >= self._retry_s:
            raise self._last from error

    def pause_s(self) -> float:
        wait = getattr(self._last, "retry_after_s", None) or 0.2
        return max(0.0, min(wait, _LONGEST_PAUSE_S, self._deadline - time.monotonic()))


def _settings(base_url: str, token: str) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "headers": {"Authorization": f"Bearer {token}"},
        "timeout": httpx.Timeout(30.0, connect=5.0),
        # the gateway is named by its address; a proxy meant for the internet has no part in it
        "trust_env": False,
    }


def _submission(prompts: Sequence[Any], key: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    body = {"prompts": list(prompts), **{name: value for name, value in fields.items() if value is not None}}
    return {"json": body, "headers": {"Idempotency-Key": key or secrets.token_hex(16)}}


def _retrying(retry_s: float) -> dict[str, Any]:
    return {
        "retry": retry_if_exception_type(_RETRIED),
        "wait": _wait,
        "stop": stop_after_delay(retry_s),
        "reraise": True,
    }


def _wait(state: RetryCallState) -> float:
    """What Retry-After asks for, else growing; with jitter, so that many clients do not come back at once."""
    error = state.outcome.exception() if state.outcome else None
    asked: float | None = getattr(error, "retry_after_s", None)
    grown = 0.1 * 2 ** min(state.attempt_number, 8)
    return min(_LONGEST_PAUSE_S, asked if asked is not None else grown) * random.uniform(1.0, 1.25)


def _answer(response: httpx.Response) -> dict[str, Any]:
    _raise_refusal(response)
    answer: dict[str, Any] = response.json()
    return answer


def _raise_refusal(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        detail = response.json()["error"]
        message, code, param = str(detail["message"]), detail.get("code"), detail.get("param")
    except (ValueError, KeyError, TypeError):
        message, code, param = f"HTTP {response.status_code}: {response.text[:200]}", None, None
    wait = _retry_after(response)
    match response.status_code:
        case 404:
            raise NotFound(message)
        case 409:
            raise IdempotencyConflict(message)
        case 410:
            raise Gone(message)
        case 429:
            raise QueueFull(message, wait or 1.0)
        case 502 | 503 | 504:
            raise Unreachable(message, wait)
    raise Refused(message, status=response.status_code, code=code, param=param)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; the date form of the header is not used by the gateway."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else None


def _unreachable(error: httpx.TransportError) -> Unreachable:
    return Unreachable(f"the gateway does not answer: {type(error).__name__}: {error}")
