"""The fleet's notice board: who is alive with which version, which version is current, and the epochs of a push.

`RedisBoard` in `redis_board` keeps it. Attachment: a fleet follows the weights of one run at a time (the trainer that
attached); it serves the rollout queues of every run that is registered with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

SETTINGS_REFUSED = "user_config is not in force"
"""How the `detail` of a replica begins that goes on with its earlier settings, since it refused the newest."""

FELT_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Of what users felt of a push, where pushes are counted by it."""


class ReplicaState(StrEnum):
    """Of a replica's process, from RESTARTING, for the first time or in a dead one's place, on; `services/fleet.py` has
    the edges."""

    RESTARTING = "restarting"
    """The engine starts and rehearses; it takes no users yet."""
    STALE = "stale"
    """Serves users; harvests nothing, since its weights are too far behind, not compared yet or failed their check."""
    HEALTHY = "healthy"
    """Serves users and harvests."""
    SUSPECT = "suspect"
    """Has work and takes no step; harvests nothing until it does."""
    DEAD = "dead"
    """Its engine will not answer any more; Serve replaces the process."""
    RETIRED = "retired"
    """It leaves the fleet: Serve sends it no users any more."""


ANSWERING = frozenset({ReplicaState.STALE, ReplicaState.HEALTHY})
"""States in which a replica answers the users that come to it, those included who wait while it changes its weights. A
suspect one lets them in, and none of them gets a token."""


class ReplicaRole(StrEnum):
    """Of a replica of a fleet that lends: users have it while SERVING alone, rollouts while ROLLOUT alone."""

    SERVING = "serving"
    DRAINING = "draining"
    """No new users; those it has may finish."""
    ROLLOUT = "rollout"
    RECLAIMING = "reclaiming"
    """Rollouts are cut, and the production model is put back and checked."""
    BROKEN = "broken"
    """The production model did not come back: Serve replaces the replica."""


class CutCause(StrEnum):
    """Why a sample had to leave the engine before its end."""

    USER = "user"
    """One came who found no seat."""
    SLO = "slo"
    """Users were to stay inside it."""
    PUSH = "push"
    """New weights came, or were checked."""
    CACHE = "cache"
    """A user's prompt needed its room in the KV cache."""
    ADAPTER = "adapter"
    """A new version needed the place of its adapter."""
    LEND = "lend"
    """A replica that was lent went back to users."""
    SETTINGS = "settings"
    """Others came into force, with fewer seats for rollouts."""
    MEASURE = "measure"
    """The idle engine's speed was measured."""


class PushPath(StrEnum):
    """How a version reached a replica."""

    COLLECTIVE = "collective"
    ARTEFACT = "artefact"


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """One replica's report of one applied version."""

    version: int
    path: PushPath
    epoch: int | None
    receive_s: float
    """From the start of receiving or reading until all bytes are staged and their digests checked."""
    pause_s: float
    """How long generation stood still: from pause to resume, or while a worker loaded an adapter."""
    canary_gap: float
    """Mean absolute difference to the expected logprobs, nats."""
    verified: bool
    applied_at: float
    """Unix seconds."""
    felt_s: float | None = None
    """The longest wait for a token, the first one included, of any user's sequence in the engine that overlaps the push
    on this replica, from the first byte to the check. None where no user was there, and until their waits are over."""


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """One change of a replica's role, and when each part of it was done."""

    to: ReplicaRole
    """ROLLOUT, or SERVING for a reclaim."""
    decided_at: float
    """Unix seconds, by the clock of whoever decided."""
    parts: Mapping[str, float]
    """Seconds from the decision to the end of each part, in their order: `seen`, `drained` (of users or rollouts),
    `swapped`, `verified`, and of a reclaim `first_token` of the first user."""
    cut_tokens: int = 0
    """Prompt and response tokens that the samples cut for it had in the engine: computed again wherever they go on."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a replica says of itself every second or so."""

    replica: str
    """Unique per process incarnation."""
    host: str
    pid: int
    state: ReplicaState
    policy: str
    version: int
    """Verified version in use; 0 is the model as loaded at start."""
    seats_total: int
    seats_users: int
    seats_rollouts: int
    rollout_tokens: int
    """Response tokens generated for rollouts since start."""
    user_requests: int
    """User requests ended since start, those that failed included."""
    rehearsal_gap: float | None
    """Canary gap of the rehearsal at start."""
    pushes: tuple[AppliedPush, ...] = ()
    """The newest few, newest last."""
    started_at: float = 0.0
    sent_at: float = 0.0
    detail: str = ""
    """Why it is not healthy or, where it is, which of its settings cannot do what they are for."""
    pinned: int | None = None
    """The version it is held at for an evaluation."""
    rollout_cuts: int = 0
    """Times that a sample was cut since start, whatever for; its tokens stayed."""
    rollout_cut_causes: Mapping[str, int] = field(default_factory=dict)
    """Those times by `CutCause`."""
    rollout_preempted: int = 0
    """Response tokens that samples had when they were cut, since start."""
    rollout_salvaged: int = 0
    """Response tokens that samples went on from, after a cut or another attempt's."""
    rollout_prefilled_again: int = 0
    """Prompt and response tokens computed once more to go on from those."""
    rollout_lost: int = 0
    """Response tokens that samples had here, of an earlier attempt too, neither handed in nor salvaged."""
    sharing: str = "live"
    """How its fleet shares engines between users and rollouts: `adapter` takes LoRA adapters, all others weights."""
    max_lora_rank: int | None = None
    """Of the adapters that it takes; None where it takes whole weights."""
    adapter_layers: tuple[str, ...] = ()
    """Last parts of the names of the layers that they can change."""
    seat_limit: int | None = None
    """Rollouts that the SLO would have room for without users, of whom each takes the room of some; None without an
    SLO."""
    slo_headroom: float | None = None
    """Share of what users alone leave of the SLO's targets, beyond which rollouts get less of the engine, as learned
    from users at the load of now; None without an SLO and on a replica that is lent as a whole."""
    slo_breaches: int = 0
    """Times that rollouts lost every step since users' latency was outside the SLO."""
    user_failures: int = 0
    """User requests that the engine ended with an error of its own, since start."""
    role: ReplicaRole | None = None
    """None in a fleet that does not lend: users and rollouts share the replica."""
    switches: tuple[RoleSwitch, ...] = ()
    """The newest few, newest last."""
    lends: int = 0
    """Times it took rollouts since start."""
    reclaims: int = 0
    """Times it came back to users since start."""
    prefill_token_s: float = 0.0
    """What each further token of a prompt adds to a first token on the idle engine, as measured at its start; 0 where
    none is to be seen."""
    push_felt_counts: tuple[int, ...] = ()
    """Pushes since start by their `felt_s`: up to each of FELT_BOUNDS_S but above the one before, and above all."""
    push_felt_sum_s: float = 0.0
    """Of all of those."""
    seats_sitting_out: int = 0
    """Of `seats_rollouts`, those that have no token in a step beside the users of now, so that these stay inside the
    SLO."""
    max_seats: int | None = None
    """Most that rollouts may hold by the settings in force, which may have changed since start; None where only users
    bound them."""

    @property
    def follows(self) -> bool:
        """Whether the weights of the run are to be on it."""
        return self.role in {None, ReplicaRole.ROLLOUT}

    @property
    def serves(self) -> bool:
        """Whether users' requests go to it."""
        return self.role in {None, ReplicaRole.SERVING}

    @property
    def answers(self) -> bool:
        """Whether they get an answer there."""
        return self.serves and self.state in ANSWERING


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """`weights:current` of a run: always a durable artefact."""

    policy: str
    version: int
    directory: str
    digest: str
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that replicas have in use although no run is attached any more: those that come later take it too."""

    run: str
    model: str
    """`model.path` of those replicas; others do not take it."""
    current: CurrentVersion


@dataclass(frozen=True, slots=True)
class Pin:
    """One replica stays at a version for a while and generates a run's evaluation groups with it, nothing else."""

    run: str
    replica: str
    version: int
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Invitation:
    """The trainer asks replicas into one push epoch."""

    epoch: int
    run: str
    version: int
    digest: str
    directory: str
    store_host: str
    store_port: int
    backend: str
    """gloo or nccl."""
    fencing_token: int
    op_timeout_s: float
    form_timeout_s: float
    deadline_s: float
    """For the whole push; the server's clock counts it from `open_epoch`."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Frozen ranks of an epoch: 0 is the trainer, replicas that acked in time are 1 .. n - 1, one receiver per host."""

    epoch: int
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Replica -> rank; receivers only."""
    followers: Mapping[str, str] = field(default_factory=dict)
    """Replica -> receiving replica on the same host, whose staging directory it reads."""


class Board(Protocol):
    """All methods raise StoreUnavailable when the server does not answer; those with a token raise Fenced."""

    # runs and versions
    async def attach(self, fleet: str, run: str, token: int) -> None:
        """The fleet follows this run's weights from now on.

        Raises WriterBusy while the run of another live writer is attached.
        """
        ...

    async def detach(self, fleet: str, run: str, token: int) -> None:
        """On a clean stop; the replicas keep their weights, and give them to those that come later, see `keep`."""
        ...

    async def keep(self, fleet: str, kept: Kept, *, ttl_s: float) -> None:
        """A replica has this version in use and no run to follow; known for `ttl_s`, in the place of an earlier one."""
        ...

    async def kept(self, fleet: str) -> Kept | None: ...

    async def attached_run(self, fleet: str) -> str | None: ...

    async def register_run(self, fleet: str, run: str) -> None:
        """The fleet's harvesters look into this run's queue from now on."""
        ...

    async def runs(self, fleet: str) -> list[str]: ...

    async def reserve_version(self, run: str, token: int, *, at_least: int) -> int:
        """A number never given before: max(counter + 1, at_least). Call before the first byte is written."""
        ...

    async def set_current(self, run: str, token: int, current: CurrentVersion) -> None:
        """Move the pointer; refused (Fenced) when its version is not larger than the present one."""
        ...

    async def current(self, run: str) -> CurrentVersion | None: ...

    # replicas
    async def heartbeat(self, fleet: str, beat: Heartbeat, *, ttl_s: float) -> None: ...

    async def retire(self, fleet: str, replica: str) -> None: ...

    async def replicas(self, fleet: str) -> list[Heartbeat]:
        """Those whose heartbeat has not expired, oldest first."""
        ...

    async def seen_replicas(self, fleet: str) -> int:
        """How many distinct replicas ever sent a heartbeat."""
        ...

    # evaluations
    async def pin(self, fleet: str, pin: Pin, *, ttl_s: float) -> None:
        """In the place of an earlier one; ends by itself after `ttl_s`."""
        ...

    async def unpin(self, fleet: str, run: str, token: int) -> None:
        """End the run's pin, if it has one."""
        ...

    async def pinned(self, fleet: str) -> Pin | None: ...

    # epochs
    async def open_epoch(self, fleet: str, invitation: Invitation) -> int:
        """INCR the epoch, post the invitation under it (its `epoch` field is filled in) and return the number."""
        ...

    async def invitation(self, fleet: str) -> Invitation | None:
        """The newest, until its deadline."""
        ...

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None:
        """Ready to receive. Ignored when the epoch is frozen or not the newest."""
        ...

    async def acks(self, fleet: str, epoch: int) -> dict[str, str]:
        """Replica -> host."""
        ...

    async def freeze(self, fleet: str, token: int, membership: Membership) -> None: ...

    async def membership(self, fleet: str, epoch: int) -> Membership | None: ...
