"""What the gateway's routes share, put together once at start."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.responses import Response

from rollout.board import Board
from rollout.queue import RolloutQueue
from services.auth import Doorkeeper
from services.config import FleetConfig
from services.limits import InFlight
from services.metrics import UserLatency
from services.prompt_size import PromptBounds
from services.rate import Rates
from services.tokenizer import PromptReader, PromptTokenizer


class UserBackend(Protocol):
    """The engines as the user routes see them. Bodies are checked; `headers` are the only ones that reach an engine."""

    def model_cards(self) -> Mapping[str, Mapping[str, Any]]:
        """OpenAI model objects by id."""
        ...

    async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """Raises ApiError for what only the engine can know to be wrong."""
        ...

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response: ...


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """Everything a route may need; nothing in it knows of HTTP but the backend's answers."""

    fleet: FleetConfig
    board: Board
    queue: Callable[[str], RolloutQueue]
    """The queue of a run."""
    backend: UserBackend
    tokenizer: PromptTokenizer
    durability: str
    """`appendfsync` class of the Redis server."""
    doorkeeper: Doorkeeper
    reader: PromptReader
    """Of users' prompts; they never wait for those of rollouts."""
    rollout_reader: PromptReader
    registry: CollectorRegistry
    latency: UserLatency
    rates: Rates
    """Of each token's requests."""
    users: InFlight
    rollouts: InFlight
    """Requests to the rollout API but streams."""
    streams: InFlight


def assemble(
    fleet: FleetConfig,
    *,
    board: Board,
    queue: Callable[[str], RolloutQueue],
    backend: UserBackend,
    tokenizer: PromptTokenizer,
    durability: str,
) -> GatewayParts:
    """The parts of one gateway process. Raises ConfigError when the tokens cannot be used."""
    limits = fleet.gateway.limits
    registry, bounds = CollectorRegistry(), PromptBounds.of(fleet)
    return GatewayParts(
        fleet=fleet,
        board=board,
        queue=queue,
        backend=backend,
        tokenizer=tokenizer,
        durability=durability,
        doorkeeper=Doorkeeper(fleet.gateway.auth),
        reader=PromptReader(tokenizer, bounds),
        # a tokenizer is not safe in two threads at once
        rollout_reader=PromptReader(deepcopy(tokenizer), bounds),
        registry=registry,
        latency=UserLatency(registry, fleet.slo),
        rates=Rates(limits.requests_per_s),
        users=InFlight(
            "user requests",
            limits.max_user_requests,
            "gateway.limits.max_user_requests",
            of_one_token=limits.of_one_token(limits.max_user_requests),
        ),
        rollouts=InFlight(
            "requests to the rollout API",
            limits.max_rollout_requests,
            "gateway.limits.max_rollout_requests",
            of_one_token=limits.of_one_token(limits.max_rollout_requests),
        ),
        streams=InFlight("streams of samples", limits.max_streams, "gateway.limits.max_streams"),
    )
