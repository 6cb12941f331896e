"""The rollout API: submit prompts, watch their groups, read samples, cancel."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout.errors import Gone, IdempotencyConflict, NotFound
from rollout.milestone import reached
from rollout.queue import GroupStatus, RolloutQueue, Submission
from rollout.types import RolloutRequest
from services.api_errors import ApiError, from_validation
from services.auth import Grant
from services.gateway_parts import GatewayParts
from services.limits import read_json
from services.milestone import Milestone
from services.openapi import ERRORS, body_of, needs
from services.sample_stream import MEDIA_TYPES, Format, as_they_finish, encoded
from services.sample_views import counts, group_json, group_view, is_finished, tokens_of
from services.schemas import Cancelled, Links, RolloutView, SamplesPage, SubmitBody, Submitted
from services.submissions import (
    MAX_KEY_CHARS,
    body_digest,
    check_bounds,
    check_key,
    check_stop_tokens,
    public_id,
    queue_key,
    split_id,
    to_requests,
)

_DEFAULT_WAIT_S = 600.0
_PAGE_OF_STATES = 256
_PAGE_OF_SAMPLES = 32
_PAGE_OF_TOKENS = 131_072
"""Response tokens in a page; one group always fits."""
_Cursor = Annotated[str | None, Query(description="next_cursor of the page before")]
_Limit = Annotated[int | None, Query(ge=1, description="groups in a page, up to gateway.limits.page_size")]
_KEY = Header(json_schema_extra={"minLength": 1, "maxLength": MAX_KEY_CHARS})
_STREAMS: dict[str, Any] = {media: {} for media in MEDIA_TYPES.values()}


class RolloutApi:
    """Routes of the rollout role."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._fleet = parts.fleet
        self._page_size = parts.fleet.gateway.limits.page_size

    def router(self) -> APIRouter:
        guard = needs(self._parts.doorkeeper, self._parts.rates, Grant.ROLL_OUT)
        router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"], dependencies=[guard])
        router.post("", status_code=202, response_model=Submitted, responses=ERRORS, openapi_extra=body_of(SubmitBody))(
            self.submit
        )
        router.get("/{rollout_id}", response_model=RolloutView, responses=ERRORS)(self.show)
        router.get(
            "/{rollout_id}/samples",
            response_model=SamplesPage,
            responses={200: {"description": "A page, or a stream.", "content": _STREAMS}, **ERRORS},
        )(self.samples)
        router.delete("/{rollout_id}", response_model=Cancelled, responses=ERRORS)(self.cancel)
        return router

    async def submit(self, request: Request, idempotency_key: Annotated[str | None, _KEY] = None) -> Response:
        """Accept prompts for generation. 202 means kept: the groups survive crashes of everything but the disk."""
        self._parts.rollouts.hold(request)
        key = check_key(idempotency_key)
        raw = await read_json(request)
        body = _parse(raw)
        check_bounds(body, self._fleet)
        check_stop_tokens(body, self._parts.tokenizer.vocab_size)
        run = await self._run(body.run)
        field = "prompt" if body.prompts is None else "prompts"
        prompts = await self._parts.rollout_reader.read(body.all_prompts, field=field, status=422)
        requests = to_requests(body, prompts, self._fleet)
        queue = self._parts.queue(run)
        accepted = await _accept(queue, requests, key, body_digest(raw))
        reached(Milestone.ACCEPTED)
        return _accepted(run, accepted)

    async def show(
        self, request: Request, rollout_id: str, cursor: _Cursor = None, limit: _Limit = None
    ) -> RolloutView:
        """Counts by state, and a page of the groups in the order of the prompts."""
        self._parts.rollouts.hold(request)
        run, queue, submission = await self._find(rollout_id)
        ids = submission.group_ids
        start, stop = self._page(cursor, limit or min(_PAGE_OF_STATES, self._page_size), len(ids))
        statuses = await self._kept(rollout_id, queue, ids)
        return RolloutView(
            id=rollout_id,
            run=run,
            total=len(ids),
            counts=counts(statuses),
            done=all(map(is_finished, statuses)),
            groups=[group_view(ids[i], i, statuses[i]) for i in range(start, stop)],
            next_cursor=str(stop) if stop < len(ids) else None,
        )

    async def samples(
        self,
        request: Request,
        rollout_id: str,
        *,
        cursor: _Cursor = None,
        limit: _Limit = None,
        stream: Annotated[Format | None, Query()] = None,
        wait_s: Annotated[
            float | None,
            Query(gt=0, allow_inf_nan=False, description="600 or gateway.limits.max_stream_s, whichever is less"),
        ] = None,
    ) -> Response:
        """A page of groups with their samples, or (`stream`, or the Accept header) every group as it finishes."""
        form = stream or _accepted_format(request)
        (self._parts.rollouts if form is None else self._parts.streams).hold(request)
        _, queue, submission = await self._find(rollout_id)
        ids = submission.group_ids
        if form is not None:
            await self._kept(rollout_id, queue, ids)
            return self._stream(queue, ids, form, wait_s)
        start, stop = self._page(cursor, limit or min(_PAGE_OF_SAMPLES, self._page_size), len(ids))
        statuses, groups = await _page_of_groups(queue, ids, start, stop)
        kept = statuses if any(statuses) else await self._kept(rollout_id, queue, ids)
        stop = start + len(groups)
        page = SamplesPage(
            id=rollout_id,
            groups=[],
            next_cursor=str(stop) if stop < len(ids) else None,
            done=all(map(is_finished, statuses or kept)),
        )
        body = page.model_dump_json(exclude={"groups"})
        return Response(f'{body[:-1]},"groups":[{",".join(groups)}]}}', media_type="application/json")

    async def cancel(self, request: Request, rollout_id: str) -> Cancelled:
        """End the groups that were not generated yet; those that were keep their samples."""
        self._parts.rollouts.hold(request)
        _, queue, submission = await self._find(rollout_id)
        cancelled = await queue.cancel(submission.id)
        return Cancelled(id=rollout_id, cancelled=cancelled, total=len(submission.group_ids))

    def _stream(self, queue: RolloutQueue, ids: Sequence[str], form: Format, wait_s: float | None) -> Response:
        longest = self._fleet.gateway.limits.max_stream_s
        if wait_s is None:
            wait_s = min(_DEFAULT_WAIT_S, longest)
        if wait_s > longest:
            message = f"wait_s: {wait_s:g} is over the limit of {longest:g} (gateway.limits.max_stream_s)"
            raise ApiError(422, message, code="over_limit", param="wait_s")
        events = as_they_finish(queue, ids, wait_s=wait_s, clock=time.monotonic)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(encoded(events, form), media_type=MEDIA_TYPES[form], headers=headers)

    async def _run(self, name: str | None) -> str:
        run = name or self._fleet.run
        if run != self._fleet.run:
            known = await self._parts.board.runs(self._fleet.fleet)
            if run not in known:
                listed = ", ".join(sorted({*known, self._fleet.run}))
                message = f"run: {run!r} is not registered with fleet {self._fleet.fleet!r}; known are {listed}"
                raise ApiError(422, message, code="unknown_run", param="run")
        return run

    async def _find(self, rollout_id: str) -> tuple[str, RolloutQueue, Submission]:
        parts = split_id(rollout_id)
        if parts is None or parts[0] not in {self._fleet.run, *await self._parts.board.runs(self._fleet.fleet)}:
            raise NotFound(f"no rollout {rollout_id}")
        queue = self._parts.queue(parts[0])
        return parts[0], queue, await queue.submission(parts[1])

    @staticmethod
    async def _kept(rollout_id: str, queue: RolloutQueue, ids: Sequence[str]) -> list[GroupStatus | None]:
        statuses = await queue.status(ids)
        if not any(statuses):
            raise Gone(f"rollout {rollout_id}: its samples were kept for gateway.limits.retain_s and are gone")
        return statuses

    def _page(self, cursor: str | None, limit: int, total: int) -> tuple[int, int]:
        if limit > self._page_size:
            message = f"limit: {limit} is over the limit of {self._page_size} (gateway.limits.page_size)"
            raise ApiError(422, message, code="over_limit", param="limit")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 9):
            raise ApiError(422, f"cursor: {cursor!r:.40} is not one of ours", code="invalid_value", param="cursor")
        start = min(int(cursor or 0), total)
        return start, min(start + limit, total)


async def _page_of_groups(
    queue: RolloutQueue, ids: Sequence[str], start: int, stop: int
) -> tuple[list[GroupStatus | None], list[str]]:
    """States and JSON of groups [start, stop), fewer where their samples are long; built off the event loop."""
    statuses: list[GroupStatus | None] = []
    groups: list[str] = []
    tokens = 0
    for i in range(start, stop):
        (status,) = await queue.status([ids[i]], with_groups=True)
        tokens += tokens_of(status)
        if groups and tokens > _PAGE_OF_TOKENS:
            break
        statuses.append(status)
        groups.append(await asyncio.to_thread(group_json, ids[i], i, status))
    return statuses, groups


def _parse(raw: Any) -> SubmitBody:
    try:
        return SubmitBody.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error, 422) from None


async def _accept(queue: RolloutQueue, requests: Sequence[RolloutRequest], key: str | None, digest: str) -> Submission:
    """Raises what `submit` does, with the key as the client knows it."""
    try:
        return await queue.submit(requests, idempotency_key=key and queue_key(key), body_digest=digest)
    except IdempotencyConflict as conflict:
        message = f"idempotency key {key!r} was used for submission {conflict.submission_id} with another body"
        raise IdempotencyConflict(message, conflict.submission_id) from None


def _accepted(run: str, submission: Submission) -> Response:
    rollout_id = public_id(run, submission.id)
    path = f"/v1/rollouts/{rollout_id}"
    answer = Submitted(
        id=rollout_id,
        run=run,
        group_ids=list(submission.group_ids),
        replayed=not submission.created,
        links=Links(self=path, samples=f"{path}/samples", stream=f"{path}/samples?stream=ndjson"),
    )
    headers = {"Location": path, "Idempotency-Replayed": str(answer.replayed).lower()}
    return JSONResponse(answer.model_dump(), 202, headers)


def _accepted_format(request: Request) -> Format | None:
    accept = request.headers.get("accept", "").lower()
    return next((form for form, media in MEDIA_TYPES.items() if media in accept), None)
