"""The gateway as the ingress of the Ray Serve application: the only HTTP route to an engine."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import structlog
from fastapi import FastAPI, HTTPException
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIHTTPException,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response

from rollout.config import RedisConfig
from rollout.queue import QueueLimits, RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_wishes import RedisWishes
from services.api_errors import ApiError, from_validation
from services.auth import carried_tokens, deployed_tokens
from services.config import AuthConfig, FleetConfig
from services.engine_faults import told_by_engine
from services.gateway_app import build_app
from services.gateway_parts import assemble
from services.lender import Lender
from services.logs import plain_logs
from services.recall import Recall
from services.refusals import REFUSALS
from services.role_router import NotServing
from services.serve_log import reopen_serve_log
from services.tokenizer import HuggingFaceTokenizer

log = structlog.get_logger(__name__)

_OUTAGE_S = 2.0
_TRY_AGAIN_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 0.8)
"""Waits before asking again when a replica that is lent or dead refused; longer together than a router's view is
stale."""
_MOST_SHORT = 256
"""Requests at a time that the gateway answers beyond those that may last: refusals, /healthz. Serve holds back what is
more, whoever sent it, so those that last must never be as many as all."""
_GONE = frozenset({"EngineDeadError", "ReplicaUnhealthy", "EngineBroken"})
"""Errors of a replica that mean it will not answer any more."""


class EngineBackend:
    """The user routes' way to the engines, through Ray Serve LLM's ingress."""

    def __init__(
        self,
        ingress: OpenAiIngress,
        model_cards: Mapping[str, Any],
        recall: Recall | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """With `recall` replicas are lent, and requests wait for one where none takes users."""
        self._ingress = ingress
        self._recall = recall
        self._sleep = sleep
        self._cards = {name: card.model_dump(mode="json") for name, card in model_cards.items()}

    def model_cards(self) -> Mapping[str, Mapping[str, Any]]:
        return self._cards

    async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        return await self._call("completions", CompletionRequest, body, headers)

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        return await self._call("chat", ChatCompletionRequest, body, headers)

    async def _call(self, verb: str, kind: Any, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        typed = _typed(kind, body)
        came, waits = time.monotonic(), iter(_TRY_AGAIN_S)
        while True:
            asked_at = time.monotonic()
            try:
                return await self._answer(verb, typed, headers)
            except NotServing as refusal:
                log.info("refused", refusal=str(refusal))
                others = not _left_out(refusal.replica, asked_at)
                REFUSALS.add(refusal.replica)
            if not await self._recalled(came, others=others):
                await self._sleep(_next(waits))

    async def _recalled(self, came: float, *, others: bool) -> bool:
        """Whether there is somebody to ask now, after the wait for one to come back where there are no `others`."""
        if self._recall is None:
            return False
        if others:
            return True
        self._recall.call()
        if not self._recall.worth(waited_s := time.monotonic() - came):
            return False
        await self._recall.served(waited_s)
        return True

    async def _answer(self, verb: str, typed: Any, headers: Mapping[str, str]) -> Response:
        """What one replica answers. Raises NotServing before the first byte, ApiError."""
        try:
            response: Response = await getattr(self._ingress, verb)(typed, _request(headers))
        except OpenAIHTTPException as error:
            raise told_by_engine(error.status_code, error.message) from None
        except HTTPException as error:
            raise told_by_engine(error.status_code, str(error.detail)) from None
        except (RayError, RayServeException) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, NotServing):
                raise error.cause from None
            if not _gone(error):
                raise
            log.warning("engine_gone", error=repr(error))
            raise _engine_gone() from None
        return response


def _left_out(replica: str, asked_at: float) -> bool:
    """Whether a replica had refused when it was asked and was still left out: the router knew of nobody else."""
    since = REFUSALS.since(replica)
    return since is not None and since <= asked_at


def _next(waits: Iterator[float]) -> float:
    """Seconds. Raises ApiError where there are no more."""
    if (wait_s := next(waits, None)) is not None:
        return wait_s
    message = "no replica that was asked takes users at the moment; try again"
    raise ApiError(503, message, code="no_replica_serves", headers={"Retry-After": "1"})


def _typed(kind: Any, body: Mapping[str, Any]) -> Any:
    """The body as the engine's own request. Raises ApiError 400."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, 400) from None
    except Exception as error:  # vLLM's validators raise errors of their own, which pass through pydantic
        message = str(error.args[0]) if error.args else type(error).__name__
        raise ApiError(400, message, code="engine_refused", param=getattr(error, "parameter", None)) from None


def _gone(error: Exception) -> bool:
    """Whether the replica or its engine will not answer any more, rather than having met an error of its own."""
    if not isinstance(error, RayTaskError):
        return True
    return type(error.cause).__name__ in _GONE


def _engine_gone() -> ApiError:
    message = "the engine that had the request is gone; try again"
    return ApiError(503, message, code="engine_failed", headers={"Retry-After": "5"})


def _impatient(redis: RedisConfig) -> RedisConfig:
    """A client is told to come back (503) long before a daemon would give the store up."""
    return redis.model_copy(update={"outage_s": min(redis.outage_s, _OUTAGE_S)})


def _request(headers: Mapping[str, str]) -> Request:
    """What is left of the user's request for an engine: no header of theirs."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw})


class Gateway(OpenAiIngress):  # type: ignore[misc]
    """One process that answers all HTTP requests of the fleet."""

    async def __init__(  # type: ignore[misc]
        self, fleet: FleetConfig, llm_deployments: dict[str, Any], model_cards: dict[str, Any], *, exposed: bool
    ) -> None:
        plain_logs()
        reopen_serve_log()
        OpenAiIngress.__init__(self, llm_deployments, model_cards)
        auth = deployed_tokens(fleet.gateway.auth, {}, exposed=exposed)  # of a file none came with `fleet`
        self._fleet = fleet = _with(fleet, auth)
        self._store = await RedisStore.connect(_impatient(fleet.redis), role="gateway")
        self._durability = self._store.durability()
        self._board = RedisBoard(self._store)
        await self._board.register_run(fleet.fleet, fleet.run)
        self._queues: dict[str, RolloutQueue] = {}
        limits = fleet.gateway.limits
        self._queue_limits = QueueLimits(
            max_depth=limits.max_depth,
            max_failures=limits.max_failures,
            retain_s=limits.retain_s,
            dead_retain_s=limits.dead_retain_s,
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        recall = Recall(self._fleet.lending.reclaim_s) if self._fleet.lends else None
        parts = assemble(
            self._fleet,
            board=self._board,
            queue=self._queue,
            backend=EngineBackend(self, self._model_cards, recall),
            tokenizer=HuggingFaceTokenizer(self._fleet.model.path),
            durability=self._durability,
        )
        if recall is not None:
            lender = Lender(
                self._fleet,
                board=self._board,
                wishes=RedisWishes(self._store),
                queue=self._queue,
                in_flight=lambda: parts.users.running,
                recall=recall,
            )
            self._lender = asyncio.create_task(lender.run())
        log.info("gateway ready", fleet=self._fleet.fleet, run=self._fleet.run, durability=self._durability)
        return build_app(parts)

    def _queue(self, run: str) -> RolloutQueue:
        if run not in self._queues:
            self._queues[run] = RedisQueue(self._store, run, self._queue_limits)
        return self._queues[run]


def deployment(
    fleet: FleetConfig,
    llm_deployments: dict[str, Application],
    model_cards: dict[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    exposed: bool,
) -> Application:
    """The bound ingress, one replica of it, whose process gets `environment` too.

    Tokens that neither the config nor its file has are taken from this process's environment: under `serve deploy` that
    of a task on the cluster. Those of the file stay there, for the gateway to read. Raises ConfigError when there is no
    token or one cannot be used, or can be guessed and the door is `exposed`, or when Redis has no address.
    """
    deployed_tokens(fleet.gateway.auth, os.environ, exposed=exposed)
    fleet = _with(fleet, carried_tokens(fleet.gateway.auth, os.environ))
    most = fleet.gateway.limits.places + _MOST_SHORT
    actor = {"num_cpus": 0, "runtime_env": {"env_vars": dict(environment or {})}}
    ingress = serve.deployment(
        serve.ingress()(Gateway), name="Gateway", num_replicas=1, max_ongoing_requests=most, ray_actor_options=actor
    )
    return ingress.bind(fleet, llm_deployments, model_cards, exposed=exposed)


def _with(fleet: FleetConfig, auth: AuthConfig) -> FleetConfig:
    return fleet.model_copy(update={"gateway": fleet.gateway.model_copy(update={"auth": auth})})
