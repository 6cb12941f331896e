"""How the fleet is: /v1/status for administrators, /metrics for scrapers too, /healthz for anybody."""

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from rollout.board import Heartbeat, ReplicaState
from rollout.errors import StoreUnavailable
from rollout.queue import Ledger, QueueStats
from services.api_errors import retry_after
from services.auth import Grant
from services.gateway_parts import GatewayParts
from services.metrics import LEDGER_FIELDS, FleetSnapshot, Quantiles, render
from services.openapi import ERRORS, Answers, needs
from services.troubled_runs import TroubledRuns

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_LOOK_AGAIN_S = 5.0
"""A replica that starts takes longer, one that is busy for a moment less."""
_ANSWERING = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE, ReplicaState.SUSPECT})


class StatusApi:
    """Routes that tell how things are."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._troubled = TroubledRuns()
        self._was_ready = False
        """At the last look that the store answered."""
        self._look: asyncio.Task[tuple[str, bool]] | None = None
        """One at a time, for all who ask meanwhile: anybody may, and none of them is to cost the store anything."""

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operation"])
        parts = self._parts
        sees = [needs(parts.doorkeeper, parts.rates, Grant.SEE_STATUS)]
        reads = [needs(parts.doorkeeper, parts.rates, Grant.READ_METRICS)]
        router.get("/v1/status", dependencies=sees, responses=ERRORS)(self.status)
        page: Answers = {
            200: {"description": "Prometheus text.", "content": {PROMETHEUS: {"schema": {"type": "string"}}}}
        }
        router.get("/metrics", dependencies=reads, response_class=Response, responses={**ERRORS, **page})(self.metrics)
        sick: Answers = {503: {"description": "No replica is ready, or it is not known whether one is."}}
        router.get("/healthz", responses=sick)(self.healthz)
        router.head("/healthz", include_in_schema=False)(self.healthz)  # what load balancers ask
        return router

    async def status(self) -> dict[str, Any]:
        """Replicas, seats, versions, depths, the ledger, users' latency, and what a 202 is worth."""
        snapshot = await self._snapshot()
        fleet = self._parts.fleet
        return {
            "fleet": fleet.fleet,
            "model": fleet.served.name,
            "run": fleet.run,
            "attached_run": await self._parts.board.attached_run(fleet.fleet),
            "durability": self._parts.durability,
            "current_version": snapshot.current_version,
            "replicas": [_replica(beat) for beat in snapshot.replicas],
            "replicas_seen": snapshot.seen_replicas,
            "min_replicas": fleet.autoscaling.min_replicas,
            "seats": _seats(snapshot),
            "runs": {run: _run(snapshot, run) for run in snapshot.ledgers},
            "users": {
                "in_flight": self._parts.users.running,
                "ttft_ms": _milliseconds(self._parts.latency.ttft),
                "tpot_ms": _milliseconds(self._parts.latency.tpot),
                "slo_attainment": self._parts.latency.slo_attainment,
                "way_ms": round(1000 * self._parts.latency.ways.seconds, 1),
            },
            "streams": self._parts.streams.running,
            "at": time.time(),
        }

    async def metrics(self) -> Response:
        """The same figures for Prometheus."""
        return Response(render(self._parts.registry, await self._snapshot()), media_type=PROMETHEUS)

    async def healthz(self) -> Response:
        """200 while a replica is ready for users, who need no store: where it does not answer, as far as was known."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._looked())
        status, ready = await asyncio.shield(self._look)
        return _health(status, ready=ready)

    async def _looked(self) -> tuple[str, bool]:
        try:
            replicas = await self._parts.board.replicas(self._parts.fleet.fleet)
        except StoreUnavailable:
            return "store unavailable", self._was_ready
        self._was_ready = any(beat.state in _ANSWERING and beat.serves for beat in replicas)
        return "ok" if self._was_ready else "no replica ready", self._was_ready

    async def _snapshot(self) -> FleetSnapshot:
        parts, fleet = self._parts, self._parts.fleet
        attached = await parts.board.attached_run(fleet.fleet)
        runs = sorted({fleet.run, *await parts.board.runs(fleet.fleet)})
        run = attached or fleet.run
        current = await self._troubled.ask(f"{run}: weights", partial(parts.board.current, run))
        books: dict[str, tuple[Ledger, QueueStats]] = {}
        for run in runs:
            queue = parts.queue(run)
            ledger, stats = await self._troubled.ask(run, queue.ledger), await self._troubled.ask(run, queue.stats)
            if ledger is not None and stats is not None:
                books[run] = ledger, stats
        return FleetSnapshot(
            replicas=await parts.board.replicas(fleet.fleet),
            seen_replicas=await parts.board.seen_replicas(fleet.fleet),
            current_version=current.version if current else 0,
            ledgers={run: ledger for run, (ledger, _) in books.items()},
            stats={run: stats for run, (_, stats) in books.items()},
        )


def _health(status: str, *, ready: bool) -> Response:
    if ready:
        return JSONResponse({"status": status})
    return JSONResponse({"status": status}, 503, {"Retry-After": retry_after(_LOOK_AGAIN_S)})


def _replica(beat: Heartbeat) -> dict[str, Any]:
    return {**asdict(beat), "state": beat.state.value}


def _seats(snapshot: FleetSnapshot) -> dict[str, int]:
    answering = [beat for beat in snapshot.replicas if beat.state in _ANSWERING]
    total = sum(beat.seats_total for beat in answering)
    users = sum(beat.seats_users for beat in answering)
    rollouts = sum(beat.seats_rollouts for beat in answering)
    # users who wait for a seat are counted with those who have one
    free = sum(max(0, beat.seats_total - beat.seats_users - beat.seats_rollouts) for beat in answering)
    return {"total": total, "users": users, "rollouts": rollouts, "free": free}


def _run(snapshot: FleetSnapshot, run: str) -> dict[str, Any]:
    ledger, stats = snapshot.ledgers[run], snapshot.stats[run]
    return {
        "ledger": {
            **{field: getattr(ledger, field) for field in LEDGER_FIELDS},
            "queued": ledger.queued,
            "leased": ledger.leased,
            "experience": ledger.experience,
        },
        "depths": {
            "queued": {purpose.value: number for purpose, number in stats.queued.items()},
            "leased": {purpose.value: number for purpose, number in stats.leased.items()},
            "experience": stats.experience,
            "dead": stats.dead,
        },
    }


def _milliseconds(measured: Quantiles) -> dict[str, float | int | None]:
    def scaled(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 3)

    return {"count": measured.count, "p50": scaled(measured.p50), "p95": scaled(measured.p95)}
