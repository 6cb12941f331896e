"""The OpenAI routes: users' requests are checked here, lose what could harm others, and go to the engines."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from rollout.messages import joined_text
from services.api_errors import ApiError, from_validation, over_limit, shown
from services.auth import Grant
from services.gateway_parts import GatewayParts
from services.grammar_repeats import check_repeats
from services.grammar_size import check_grammar
from services.limits import read_json
from services.metrics import LEFT
from services.openapi import ERRORS, Answers, body_of, needs
from services.proxy_arrival import Arrival, arrival, waited_s
from services.submissions import check_context
from services.user_schemas import DROPPED, ChatBody, CompletionBody
from services.way import HEADER

_STREAM: dict[str, Any] = {"text/event-stream": {}}
_ANSWER: Answers = {
    200: {"description": "An OpenAI object, or its chunks.", "content": {"application/json": {}, **_STREAM}}
}


class UserApi:
    """Routes of the user role."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._limits = parts.fleet.gateway.limits

    def router(self) -> APIRouter:
        parts = self._parts
        router = APIRouter(prefix="/v1", tags=["users"], dependencies=[needs(parts.doorkeeper, parts.rates, Grant.USE)])
        router.get("/models", responses=ERRORS)(self.models)
        router.get("/models/{model:path}", responses=ERRORS)(self.model)
        router.post("/completions", responses={**_ANSWER, **ERRORS}, openapi_extra=body_of(CompletionBody))(
            self.completions
        )
        router.post("/chat/completions", responses={**_ANSWER, **ERRORS}, openapi_extra=body_of(ChatBody))(self.chat)
        return router

    async def models(self) -> dict[str, Any]:
        """The models that answer here."""
        return {"object": "list", "data": list(self._parts.backend.model_cards().values())}

    async def model(self, model: str) -> dict[str, Any]:
        """One model."""
        cards = self._parts.backend.model_cards()
        if model not in cards:
            raise self._unknown_model(model)
        return dict(cards[model])

    async def completions(self, request: Request) -> Response:
        """OpenAI text completions; `stream: true` answers as server-sent events."""
        self._parts.users.hold(request)
        value, came = await self._read(request)
        body = _parse(CompletionBody, value)
        await self._check_completion(body)
        sent = self._forwarded(body)
        return await self._timed(self._parts.backend.completions(sent, self._engine_headers()), came, body)

    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions; `stream: true` answers as server-sent events."""
        self._parts.users.hold(request)
        value, came = await self._read(request)
        body = _parse(ChatBody, value)
        await self._check_chat(body)
        sent = self._forwarded(body)
        return await self._timed(self._parts.backend.chat(sent, self._engine_headers()), came, body)

    async def _read(self, request: Request) -> tuple[Any, Arrival]:
        """The body, and when the request came to Serve's proxy, which holds it until it is asked for."""
        latency = self._parts.latency
        came, waited = latency.now(), waited_s(request.headers, time.monotonic())
        value = await read_json(request)
        return value, arrival(came, latency.now() - came, waited)

    async def _check_completion(self, body: CompletionBody) -> None:
        sequences = len(body.prompts) * (body.n or 1)
        if sequences > self._limits.max_n:
            raise over_limit(400, "prompt", f"{sequences} sequences (prompts x n)", self._limits.max_n, _MAX_N)
        self._check_common(body, body.max_tokens, "max_tokens")
        _check_candidates(body)
        prompts = await self._parts.reader.read(body.prompts, field="prompt", status=400)
        room = min(self._room(len(prompt.ids), body.max_tokens, "prompt") for prompt in prompts)
        body.max_tokens = min(_OPENAI_DEFAULT, room) if body.max_tokens is None else body.max_tokens

    async def _check_chat(self, body: ChatBody) -> None:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._check_common(body, asked, field)
        self._check_tools(body)
        messages = [_plain(m.model_dump(exclude_none=True)) for m in body.messages]
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.tools:
            options["tools"] = body.tools
        if body.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        (prompt,) = await self._parts.reader.read([messages], field="messages", status=400, options=options)
        room = self._room(len(prompt.ids), asked, "messages")
        body.max_completion_tokens = min(room, self._limits.max_tokens) if asked is None else asked
        body.max_tokens = None

    def _check_common(self, body: CompletionBody | ChatBody, asked: int | None, field: str) -> None:
        cards = self._parts.backend.model_cards()
        if body.model is None and len(cards) == 1:
            body.model = next(iter(cards))
        if body.model not in cards:
            raise self._unknown_model(body.model)
        if body.n is not None and body.n > self._limits.max_n:
            raise over_limit(400, "n", body.n, self._limits.max_n, _MAX_N)
        _check_seeds(body)
        if asked is not None and asked > self._limits.max_tokens:
            raise over_limit(400, field, asked, self._limits.max_tokens, "gateway.limits.max_tokens")
        if body.response_format is not None:
            check_grammar("response_format", body.response_format, self._limits)
            check_repeats("response_format", body.response_format)
            _check_format(body.response_format)

    def _check_tools(self, body: ChatBody) -> None:
        """Without a parser the engine takes tools only to refuse them, by the names of flags that are not ours."""
        for index, tool in enumerate(body.tools or ()):
            check_grammar(f"tools.{index}", tool, self._limits)
        check_repeats("tools", body.tools)
        if not body.tools or body.tool_choice == "none":
            return
        extra = self._parts.fleet.engine.extra
        if missing := [f"fleet.engine.extra.{name}" for name in _TOOL_SETTINGS if not extra.get(name)]:
            message = (
                f"tools: this fleet reads no tool calls, as its operator did not set {' and '.join(missing)} (true, "
                "and the name of vLLM's parser for the model); leave tools out, or give tool_choice 'none' to only "
                "show them to the model"
            )
            raise ApiError(400, message, code="unsupported_tools", param="tools")

    def _room(self, prompt_tokens: int, asked: int | None, field: str) -> int:
        longest = self._parts.fleet.engine.max_model_len
        check_context(field, prompt_tokens, asked or 1, longest, status=400)
        return longest - prompt_tokens

    def _forwarded(self, body: CompletionBody | ChatBody) -> dict[str, Any]:
        sent = body.model_dump(exclude_none=True)
        if sent.get("continue_final_message"):
            sent.setdefault("add_generation_prompt", False)  # the engine takes no request that leaves both on
        return sent

    async def _timed(self, answering: Awaitable[Response], came: Arrival, body: CompletionBody | ChatBody) -> Response:
        latency, streams = self._parts.latency, bool(body.stream)
        try:
            response = await answering
        except asyncio.CancelledError:
            latency.unanswered(came.at, LEFT, streams=streams)
            raise
        except Exception as error:
            status = error.status if isinstance(error, ApiError) else 500
            if status >= 500:
                latency.unanswered(came.at, status, streams=streams)
            raise
        if isinstance(response, StreamingResponse):
            response.body_iterator = latency.streamed(response.body_iterator, came.at, held_s=came.held_s)
        else:
            latency.answered(came.at, response.status_code)
        return response

    def _engine_headers(self) -> dict[str, str]:
        """A fresh request id: clients' own could collide inside an engine, and no other header of theirs goes
        further."""
        way = f"{self._parts.latency.ways.seconds:.4f}"
        return {"x-request-id": uuid.uuid4().hex, "content-type": "application/json", HEADER: way}

    def _unknown_model(self, model: str | None) -> ApiError:
        known = ", ".join(sorted(self._parts.backend.model_cards()))
        return ApiError(
            404, f"model: no model {shown(model)}; known are {known}", code="model_not_found", param="model"
        )


_MAX_N = "gateway.limits.max_n"
_OPENAI_DEFAULT = 16
_MAX_SEED = 2**63 - 1
_FORMATS = ("text", "json_object", "json_schema")
_TOOL_SETTINGS = ("enable_auto_tool_choice", "tool_call_parser")
"""vLLM's; Ray Serve LLM hands both to its frontend, which loads the parser of any tool choice only with both."""
Body = TypeVar("Body", CompletionBody, ChatBody)


def _parse(kind: type[Body], value: Any) -> Body:
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k not in DROPPED}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error, 400) from None


def _check_format(response_format: Mapping[str, Any]) -> None:
    """vLLM's own `structural_tag` is compiled where it is read, which is here, while all others wait."""
    if (kind := response_format.get("type")) not in _FORMATS:
        message = f"response_format.type is {shown(kind)}; known are {', '.join(_FORMATS)}"
        raise ApiError(400, message, code="invalid_value", param="response_format")


def _check_seeds(body: CompletionBody | ChatBody) -> None:
    """Of several sequences each has a seed of its own, the next number; raises ApiError 400 where the last one is none
    of the 64-bit integers that an engine keeps: it would end with it."""
    if body.seed is not None and (last := body.seed + (body.n or 1) - 1) > _MAX_SEED:
        message = f"seed: {body.seed} with n={body.n} needs seeds up to {last}, above {_MAX_SEED}"
        raise ApiError(400, message, code="invalid_value", param="seed")


def _check_candidates(body: CompletionBody) -> None:
    """What OpenAI's own schema allows and an engine here does not do; raises ApiError 400."""
    if body.best_of not in {None, body.n or 1}:
        message = f"best_of: {body.best_of} is not n={body.n or 1}, and candidates are not ranked here"
        raise ApiError(400, message, code="invalid_value", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens: 0 asks for no token; give 1 or more, or echo=true for the prompt alone"
        raise ApiError(400, message, code="invalid_value", param="max_tokens")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """With its content parts joined to text, as the template sees them."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": content or ""}
    try:
        return {**message, "content": joined_text(content)}
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", code="unsupported_content", param="messages") from None
