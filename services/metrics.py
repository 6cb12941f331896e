"""What users feel, measured where they are answered, and the Prometheus page of the whole fleet."""

import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.board import FELT_BOUNDS_S, CutCause, Heartbeat, ReplicaRole
from rollout.percentile import percentile
from rollout.queue import Ledger, QueueStats
from services.slo import SloConfig, attained
from services.stream_marks import StreamMarks
from services.way import Ways

_WINDOW = 1024
LEFT = 499
"""Status of a request whose client went away."""
_FAILED = 500
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of the newest observations, seconds; None before the first."""

    count: int
    p50: float | None
    p95: float | None


def quantiles(values: Sequence[float]) -> Quantiles:
    """Nearest-rank median and 95th percentile."""
    return Quantiles(len(values), percentile(values, 0.5), percentile(values, 0.95))


class UserLatency:
    """Time to first token (TTFT) and time per output token (TPOT) of streamed answers, duration of all."""

    def __init__(
        self, registry: CollectorRegistry, slo: SloConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._slo = slo
        self._clock = clock
        self._attained: deque[bool] = deque(maxlen=_WINDOW)
        self._ttft: deque[float] = deque(maxlen=_WINDOW)
        self._tpot: deque[float] = deque(maxlen=_WINDOW)
        names: Any = {"registry": registry, "namespace": "nightshift", "subsystem": "user"}
        self._ttft_seconds = Histogram("ttft_seconds", "Time to first token.", buckets=_TTFT_BUCKETS, **names)
        self._tpot_seconds = Histogram("tpot_seconds", "Time per output token.", buckets=_TPOT_BUCKETS, **names)
        self._duration = Histogram("duration_seconds", "Whole answers.", buckets=_DURATION_BUCKETS, **names)
        self._requests = Counter("requests", "Answered user requests.", ["status"], **names)
        self._streams = Counter("slo_streams", "Streamed answers, inside the SLO or not.", ["attained"], **names)
        self.ways = Ways(clock)
        """Of first tokens beside the engine."""
        way = Gauge("way_seconds", "Of first tokens, beside the engine.", **names)
        way.set_function(lambda: self.ways.seconds)

    @property
    def ttft(self) -> Quantiles:
        return quantiles(self._ttft)

    @property
    def tpot(self) -> Quantiles:
        return quantiles(self._tpot)

    @property
    def slo_attainment(self) -> float | None:
        """Share of the newest streams that were inside the SLO; None before the first, and without an SLO."""
        return sum(self._attained) / len(self._attained) if self._attained else None

    def now(self) -> float:
        return self._clock()

    def answered(self, started: float, status: int) -> None:
        """A whole answer was ready."""
        self._requests.labels(str(status)).inc()
        self._duration.observe(self._clock() - started)

    async def streamed(
        self, chunks: AsyncIterable[str | bytes | memoryview], started: float, *, held_s: float = 0.0
    ) -> AsyncIterator[bytes]:
        """Pass a server-sent event stream on, without the engine's marks, and time it; `held_s` of the time since
        `started` is no part of the way. Where the marks do not tell its tokens every data event counts as one.

        A stream that its client left is counted as 499, one that failed as 500.
        """
        marks = StreamMarks()
        first = last = None
        events, status = 0, LEFT
        try:
            async for chunk in marks.stripped(chunks):
                data = chunk.encode() if isinstance(chunk, str) else bytes(chunk)
                if b'data: {"error"' in data:
                    status = _FAILED
                found = data.count(b"data: ") - data.count(b"data: [DONE]")
                if found > 0 and status != _FAILED:
                    last = self._clock()
                    events += found
                    first = self._first_token(last, started, held_s, marks.engine_s) if first is None else first
                yield data
            status = 200 if status == LEFT else status
        except Exception:
            status = _FAILED
            raise
        finally:
            tokens, tpot_s = marks.tokens or events, None
            if first is not None and last is not None and events > 1 and tokens > 1:
                tpot_s = (last - first) / (tokens - 1)
                self._tpot.append(tpot_s)
                self._tpot_seconds.observe(tpot_s)
            self._judge(started, first, tpot_s, status)
            self.answered(started, status)

    def unanswered(self, started: float, status: int, *, streams: bool) -> None:
        """It ended before there was anything to send: its client left, or the engine failed it."""
        if streams:
            self._judge(started, None, None, status)
        self.answered(started, status)

    def _judge(self, started: float, first: float | None, tpot_s: float | None, status: int) -> None:
        if not self._slo.guards:
            return
        # who left before the first token has waited until now
        inside = attained(self._slo, (self._clock() if first is None else first) - started, tpot_s)
        if first is None and inside and status == LEFT:
            return
        inside = inside and status < _FAILED
        self._attained.append(inside)
        self._streams.labels(str(inside).lower()).inc()

    def _first_token(self, at: float, started: float, held_s: float, engine_s: float | None) -> float:
        self._ttft.append(at - started)
        self._ttft_seconds.observe(at - started)
        if engine_s is not None:
            self.ways.add(at - started - held_s - engine_s)
        return at


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """What the board and the queues said at one moment."""

    replicas: Sequence[Heartbeat]
    seen_replicas: int
    current_version: int
    ledgers: Mapping[str, Ledger]
    stats: Mapping[str, QueueStats]


_ROLLOUT_FIGURES = {
    "tokens": "Response tokens generated",
    "preempted": "Response tokens that samples had when they were cut",
    "salvaged": "Response tokens that samples went on from",
    "prefilled_again": "Tokens computed once more to go on from those",
    "lost": "Response tokens neither handed in nor salvaged",
}
"""Fields `rollout_*` of a heartbeat."""
LEDGER_FIELDS = ("accepted", "trained", "delivered", "filtered", "stale", "dead", "cancelled", "pending", "balance")


class SnapshotCollector(Collector):
    """One scrape's worth of fleet figures."""

    def __init__(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from self._fleet()
        yield from self._replicas()
        yield from self._queues()

    def _fleet(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield GaugeMetricFamily("nightshift_replicas", "Replicas alive.", len(snapshot.replicas))
        yield GaugeMetricFamily("nightshift_replicas_seen", "Replicas ever seen.", snapshot.seen_replicas)
        yield GaugeMetricFamily("nightshift_current_version", "Version published last.", snapshot.current_version)

    def _replicas(self) -> Iterator[Metric]:
        seats = GaugeMetricFamily("nightshift_seats", "Seats by use.", labels=["replica", "use"])
        limit = GaugeMetricFamily(
            "nightshift_seat_limit", "Rollouts that the SLO has room for without users.", labels=["replica"]
        )
        headroom = GaugeMetricFamily(
            "nightshift_slo_headroom",
            "Share of what users leave of the SLO that rollouts may use up, at the load of now.",
            labels=["replica"],
        )
        breaches = GaugeMetricFamily(
            "nightshift_slo_breaches",
            "Times rollouts lost every step to users outside the SLO, since its start.",
            labels=["replica"],
        )
        version = GaugeMetricFamily("nightshift_replica_version", "Verified version.", labels=["replica", "state"])
        rollouts = [
            GaugeMetricFamily(f"nightshift_replica_rollout_{name}", f"{what}, since its start.", labels=["replica"])
            for name, what in _ROLLOUT_FIGURES.items()
        ]
        cuts = CounterMetricFamily(
            "nightshift_replica_rollout_cuts",
            "Times a sample had to leave the engine before its end, since the replica's start.",
            labels=["replica", "cause"],
        )
        failures = GaugeMetricFamily(
            "nightshift_replica_user_failures",
            "User requests that its engine failed, since its start.",
            labels=["replica"],
        )
        felt = HistogramMetricFamily(
            "nightshift_push_felt_seconds",
            "Longest wait for a token of any user during a push, since the replica's start.",
            labels=["replica"],
        )
        for beat in self._snapshot.replicas:
            if any(beat.push_felt_counts):
                felt.add_metric([beat.replica], _buckets(beat.push_felt_counts), beat.push_felt_sum_s)
            failures.add_metric([beat.replica], beat.user_failures)
            for cause in CutCause:
                cuts.add_metric([beat.replica, cause.value], beat.rollout_cut_causes.get(cause.value, 0))
            for use, number in _seats(beat).items():
                seats.add_metric([beat.replica, use], number)
            version.add_metric([beat.replica, beat.state.value], beat.version)
            breaches.add_metric([beat.replica], beat.slo_breaches)
            if beat.seat_limit is not None:
                limit.add_metric([beat.replica], beat.seat_limit)
            if beat.slo_headroom is not None:
                headroom.add_metric([beat.replica], beat.slo_headroom)
            for family, name in zip(rollouts, _ROLLOUT_FIGURES, strict=True):
                family.add_metric([beat.replica], getattr(beat, f"rollout_{name}"))
        yield from (seats, limit, headroom, breaches, version, failures, felt, cuts, *rollouts, *self._roles())

    def _roles(self) -> Iterator[Metric]:
        role = GaugeMetricFamily("nightshift_replica_role", "1 for the role it has.", labels=["replica", "role"])
        switches = GaugeMetricFamily(
            "nightshift_replica_switches", "Changes of role since its start.", labels=["replica", "to"]
        )
        parts = GaugeMetricFamily(
            "nightshift_replica_switch_seconds",
            "Of its newest change of role, from the decision to the end of a part.",
            labels=["replica", "to", "part"],
        )
        for beat in self._snapshot.replicas:
            if beat.role is None:
                continue
            role.add_metric([beat.replica, beat.role.value], 1)
            switches.add_metric([beat.replica, ReplicaRole.ROLLOUT.value], beat.lends)
            switches.add_metric([beat.replica, ReplicaRole.SERVING.value], beat.reclaims)
            for switch in {switch.to: switch for switch in beat.switches}.values():
                for part, seconds in switch.parts.items():
                    parts.add_metric([beat.replica, switch.to.value, part], seconds)
        yield from (role, switches, parts)

    def _queues(self) -> Iterator[Metric]:
        ledger = GaugeMetricFamily("nightshift_groups", "The ledger, in groups.", labels=["run", "state"])
        for run, entry in self._snapshot.ledgers.items():
            for state in LEDGER_FIELDS:
                ledger.add_metric([run, state], getattr(entry, state))
        depth = GaugeMetricFamily("nightshift_queue_depth", "Groups waiting.", labels=["run", "purpose", "state"])
        for run, stats in self._snapshot.stats.items():
            for state, counts in (("queued", stats.queued), ("leased", stats.leased)):
                for purpose, number in counts.items():
                    depth.add_metric([run, purpose.value, state], number)
        yield from (ledger, depth)


def _seats(beat: Heartbeat) -> dict[str, int]:
    """By use."""
    return {
        "total": beat.seats_total,
        "users": beat.seats_users,
        "rollouts": beat.seats_rollouts,
        "sitting_out": beat.seats_sitting_out,
    }


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Of a histogram, each with all that are below."""
    return list(zip((*map(str, FELT_BOUNDS_S), "+Inf"), accumulate(counts), strict=True))


def render(registry: CollectorRegistry, snapshot: FleetSnapshot) -> bytes:
    """Prometheus text of the gateway's own figures and the snapshot's."""
    scrape = CollectorRegistry()
    scrape.register(SnapshotCollector(snapshot))
    return generate_latest(registry) + generate_latest(scrape)
