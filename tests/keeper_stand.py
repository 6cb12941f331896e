"""A seat keeper, and what it sees of an engine, at a clock that a test moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from services.config import HarvestConfig
from services.idle_speed import IdleSpeed
from services.seat_keeper import SeatKeeper
from services.seats import Ticket
from services.slo import SloConfig
from services.step_log import StepLog
from services.step_room import StepRoom
from services.user_window import RequestTimes

TOTAL, RESERVE = 16, 2
SLO = SloConfig(ttft_s=0.2, tpot_s=0.06, increase_per_s=10)


STEADY = SloConfig(ttft_s=1e3, tpot_s=1e3, increase_per_s=1e-6)
"""Under which the limit stays what it is."""


@dataclass
class Engine:
    """As vLLM shows itself, at a clock that the test moves."""

    now: float = 100.0
    still_until: float = 0.0
    arriving: bool = False
    """New weights for it."""
    step_log: StepLog = field(init=False)
    step_room: StepRoom = field(default_factory=StepRoom)
    rollouts_give_way: bool = False
    requests: dict[str, RequestTimes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step_log = StepLog(lambda: self.now)

    def users(self) -> dict[str, RequestTimes]:
        return self.requests


def keeper_of(engine: Engine, slo: SloConfig = SLO, **harvest: object) -> SeatKeeper:
    keeper = SeatKeeper(
        total=TOTAL,
        harvest=HarvestConfig(**{"user_reserve": RESERVE, **harvest}),
        slo=slo,
        engine=engine,
        still_until=lambda: engine.still_until,
        arriving=lambda: engine.arriving,
        clock=lambda: engine.now,
    )
    keeper.calibrate(IdleSpeed(0.05, 0.02, 8.0))
    return keeper


def step(engine: Engine, kv_usage: float, waiting: int = 1, times: int = 1) -> None:
    """After which so many users wait to be begun."""
    for _ in range(times):
        engine.step_room.stepped(waiting=waiting > 0)
        engine.step_log.record(SimpleNamespace(kv_cache_usage=kv_usage), None)


def look(keeper: SeatKeeper, engine: Engine, times: int = 1) -> None:
    for _ in range(times):
        engine.now += 0.1
        keeper.look()


def sat(keeper: SeatKeeper, count: int) -> list[Ticket]:
    return [keeper.seats.ask(prefill=1) for _ in range(count)]


@contextmanager
def crowd(keeper: SeatKeeper, engine: Engine, count: int) -> Iterator[None]:
    """So many users in the engine, who have most of long answers."""
    with keeper.users.hold(count):
        engine.requests = {
            str(number): RequestTimes(engine.now, engine.now, engine.now, 900) for number in range(count)
        }
        yield
    engine.requests = {}


def work(keeper: SeatKeeper, engine: Engine, *, steps: int, seconds: float = 0.02, sequences: int = 1) -> None:
    """The engine makes so many, of so many seconds each and a token for each of so many sequences, before the next
    look."""
    for _ in range(steps):
        engine.now += seconds
        gaps = SimpleNamespace(
            inter_token_latencies_iter=[seconds] * sequences,
            time_to_first_tokens_iter=[],
            num_generation_tokens=sequences,
            finished_requests=[],
        )
        engine.step_log.record(None, gaps)
    engine.now -= min(0.1, steps * seconds)  # a look comes in a tenth of a second, or after the steps
    look(keeper, engine)


def late_user(keeper: SeatKeeper, engine: Engine, ttft_s: float = 0.204) -> float:
    """The headroom after one who came a second ago and has all tokens."""
    engine.requests = {"a": RequestTimes(engine.now - 1.0, engine.now - 1.0 + ttft_s, engine.now, 20)}
    look(keeper, engine)
    engine.requests = {}
    look(keeper, engine)
    assert keeper.headroom is not None
    return keeper.headroom
