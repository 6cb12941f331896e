"""A replica that is lent and called back, on an engine that computes what was loaded last."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.board import CurrentVersion, Invitation, Kept, Pin, ReplicaRole
from rollout.errors import StoreUnavailable
from rollout.rewards import Reward, RewardInput
from rollout.types import Purpose, Sampling
from rollout.wishes import Wish
from services.config import HarvestConfig
from services.harvester import Harvester
from services.lending_config import LendingConfig
from services.push_config import PushConfig
from services.reconcile import Reconciler
from services.role_loop import RoleLoop
from services.seat_keeper import SeatKeeper
from services.slo import SloConfig
from services.staging import Staging
from services.step_log import StepLog
from services.step_room import StepRoom
from services.swap import WeightSwap
from services.user_window import RequestTimes

POLICY, PRODUCTION = Path("/policy"), Path("/production")
IDS = ((1, 2, 3), (4, 5, 6))


@dataclass
class Engine:
    """Logprobs tell the models apart; a load of `damaged` ones leaves what no model computes."""

    max_scored_tokens = 64
    max_model_len = 64
    vocab_size = 100
    dead = False
    loads = 0
    holds: Path = PRODUCTION
    damaged: set[Path] = field(default_factory=set)
    loaded: list[Path] = field(default_factory=list)
    stuck: asyncio.Event | None = None
    """Loads wait for it."""
    step_log: StepLog = field(default_factory=StepLog)
    step_room: StepRoom = field(default_factory=StepRoom)
    rollouts_give_way: bool = False

    def users(self) -> Mapping[str, RequestTimes]:
        return {}

    def cached_prefix(self, size: int) -> int:
        return size // 4 * 4

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: int) -> None: ...

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None: ...

    async def put_back(self) -> None: ...

    async def first_tokens(self, *, within_s: float) -> None: ...

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None: ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        if self.stuck is not None:
            await self.stuck.wait()
        self.holds = directory
        self.loaded.append(directory)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        value = -9.0 if self.holds in self.damaged else -1.0 if self.holds == POLICY else -2.0
        return (value,) * (len(token_ids) - 1)

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, since: int | None = None
    ) -> Any:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class Notices:
    """A board of a run that published nothing."""

    async def kept(self, fleet: str) -> Kept | None:
        return None

    async def attached_run(self, fleet: str) -> str | None:
        return None

    async def pinned(self, fleet: str) -> Pin | None:
        return None

    async def invitation(self, fleet: str) -> Invitation | None:
        return None

    async def current(self, run: str) -> CurrentVersion | None:
        return None


class WishList:
    def __init__(self) -> None:
        self.now: Wish | None = None
        self.away = False

    async def lead(self, fleet: str, holder: str, *, ttl_s: float) -> int | None:
        raise NotImplementedError

    async def wish(self, fleet: str, wish: Wish, *, ttl_s: float) -> None:
        self.now = wish

    async def wished(self, fleet: str) -> Wish | None:
        if self.away:
            raise StoreUnavailable("gone")
        return self.now


class NoRewards:
    def __contains__(self, name: str) -> bool:
        return False

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]:
        return []


class NoFleet:
    version, pinned, unchecked = 0, None, None

    def queues(self) -> Sequence[Any]:
        return []

    def purposes(self, run: str) -> Sequence[Purpose]:
        return []

    async def settled(self) -> None: ...


class Stand:
    def __init__(self, tmp: Path, **lending: Any) -> None:
        self.engine, self.wishes, self.now = Engine(), WishList(), 100.0
        self.swap = swap = WeightSwap(self.engine, watchdog_s=5)
        self.keeper = SeatKeeper(
            total=4,
            harvest=HarvestConfig(),
            slo=SloConfig(),
            engine=self.engine,
            still_until=lambda: swap.still_until,
            clock=lambda: self.now,
        )
        self.seats, self.users = self.keeper.seats, self.keeper.users
        self.changes: list[ReplicaRole] = []
        self.reconciler = Reconciler(
            fleet="fleet",
            replica="r",
            host="host",
            board=Notices(),  # type: ignore[arg-type]
            swap=swap,
            staging=Staging(tmp / "staging", "host-1-a"),
            config=PushConfig(),
            max_lag=4,
            model=str(POLICY),
            on_untrusted=lambda *_: None,
        )
        self.loop = RoleLoop(
            replica="r",
            fleet="fleet",
            wishes=self.wishes,
            config=LendingConfig(**lending),
            policy=POLICY,
            production=PRODUCTION,
            swap=swap,
            tolerance=0.05,
            reconciler=self.reconciler,
            harvester=Harvester(
                replica="r",
                config=HarvestConfig(),
                seats=self.seats,
                engine=self.engine,
                rewards=NoRewards(),
                fleet=NoFleet(),
            ),
            keeper=self.keeper,
            changed=lambda: self.changes.append(self.role),
            clock=lambda: self.now,
        )

    @property
    def role(self) -> ReplicaRole:
        return self.loop.standing.role

    async def step(self, *lent: str, epoch: int = 1, decided_at: float | None = None) -> ReplicaRole:
        self.wishes.now = Wish(epoch, frozenset(lent), {} if decided_at is None else {"r": decided_at})
        await self.loop._look()
        await self.loop.step()
        await self.reconciler.step()
        return self.role


async def ready(tmp: Path, **lending: Any) -> Stand:
    stand = Stand(tmp, **lending)
    await stand.loop.rehearse(IDS)
    assert stand.engine.loaded == [POLICY, PRODUCTION]
    return stand


async def lent(tmp: Path, **lending: Any) -> Stand:
    stand = await ready(tmp, **lending)
    assert await stand.step("r") is ReplicaRole.DRAINING
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    assert await stand.step("r") is ReplicaRole.ROLLOUT
    return stand
