"""A gateway without Ray: its real routes over a queue in memory, a stand-in board and engine, and words for tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response, StreamingResponse

from rollout.board import CurrentVersion, Heartbeat, ReplicaRole, ReplicaState
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits
from rollout.types import FinishReason, Group, Purpose, Sample, Segment, Timings, VersionSpan
from services.config import FleetConfig
from services.gateway_parts import GatewayParts, assemble
from services.tokenizer import TokenisedPrompt

USER, ROLLOUT, ADMIN = "user-token-1", "rollout-token-2", "admin-token-3"
METRICS = "metrics-token-4-reads-figures"
MODEL = "policy"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def fleet(slo: dict[str, Any] | None = None, **limits: Any) -> FleetConfig:
    bounds = {
        "max_body_bytes": 20_000,
        "max_prompts": 5,
        "max_n": 8,
        "max_tokens": 32,
        "max_metadata_bytes": 200,
        "page_size": 4,
        **limits,
    }
    return FleetConfig.model_validate(
        {
            "model": {"path": "/nowhere", "name": MODEL},
            "engine": {"max_model_len": 64, "max_num_seqs": 8},
            "harvest": {"user_reserve": 2},
            "slo": slo or {},
            "rewards": {"functions": {"mine": {"function": "pkg.mod:fn"}}},
            "gateway": {
                "auth": {"user": USER, "rollout": ROLLOUT, "admin": ADMIN, "metrics": METRICS},
                "limits": bounds,
            },
        }
    )


class WordTokenizer:
    """One token a word; its chat template is the contents in order."""

    vocab_size = 1000

    def __init__(self, *, chat_template: bool = True) -> None:
        self._chat_template = chat_template

    def text(self, prompt: str) -> TokenisedPrompt:
        return TokenisedPrompt(tuple(len(w) % self.vocab_size for w in prompt.split()), prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenisedPrompt:
        if not self._chat_template:
            raise ValueError("the model's tokenizer has no chat template; send text or token ids instead")
        return self.text(" ".join(f"<{m['role']}> {m['content']}" for m in messages))

    def token_ids(self, ids: Sequence[int]) -> TokenisedPrompt:
        return TokenisedPrompt(tuple(ids), " ".join(map(str, ids)))


@dataclass
class EchoBackend:
    """Answers with what reached it, so that a test sees what an engine would."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def model_cards(self) -> Mapping[str, Mapping[str, Any]]:
        return {MODEL: {"id": MODEL, "object": "model", "created": 0, "owned_by": "nightshift"}}

    async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        self.bodies.append(dict(body))
        self.headers.append(dict(headers))
        if body.get("stream"):
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        return JSONResponse({"object": "text_completion", "model": body["model"], "choices": [{"text": "ok"}]})

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        return await self.completions(body, headers)

    async def _chunks(self) -> AsyncIterator[str]:
        for word in ("a", "b", "c"):
            yield f'data: {{"choices": [{{"text": "{word}"}}]}}\n\n'
        yield "data: [DONE]\n\n"


@dataclass
class BoardStub:
    """The part of a board that the gateway reads."""

    replicas_alive: list[Heartbeat] = field(default_factory=list)
    known_runs: list[str] = field(default_factory=lambda: ["default"])
    attached: str | None = "default"

    async def runs(self, fleet: str) -> list[str]:
        return self.known_runs

    async def attached_run(self, fleet: str) -> str | None:
        return self.attached

    async def current(self, run: str) -> CurrentVersion | None:
        return CurrentVersion(policy=MODEL, version=7, directory="/w/v7", digest="d", fencing_token=1)

    async def replicas(self, fleet: str) -> list[Heartbeat]:
        return self.replicas_alive

    async def seen_replicas(self, fleet: str) -> int:
        return len(self.replicas_alive)


def heartbeat(replica: str = "r1", state: ReplicaState = ReplicaState.HEALTHY) -> Heartbeat:
    return Heartbeat(
        replica=replica,
        host="h",
        pid=1,
        state=state,
        policy=MODEL,
        version=7,
        seats_total=8,
        seats_users=1,
        seats_rollouts=5,
        seats_sitting_out=2,
        rollout_tokens=1234,
        user_requests=3,
        rehearsal_gap=0.001,
        user_failures=2,
    )


def beat(replica: str, role: ReplicaRole = ReplicaRole.SERVING, **changes: Any) -> Heartbeat:
    """Of a fleet that lends, with empty seats."""
    empty = {"seats_users": 0, "seats_rollouts": 0, "seats_sitting_out": 0}
    return replace(heartbeat(replica), role=role, **{**empty, **changes})


@dataclass
class Kit:
    """One gateway and everything behind it."""

    config: FleetConfig
    queues: dict[str, MemoryQueue]
    board: BoardStub
    backend: EchoBackend
    parts: GatewayParts

    async def finish(self, run: str = "default", *, count: int = 100, reward: float = 1.0, text: str = "answer") -> int:
        """Play an engine: lease and complete up to `count` groups."""
        queue = self.queues[run]
        leases = await queue.lease("engine", count=count, lease_s=30, purposes=list(Purpose))
        for lease in leases:
            await queue.complete(lease, scored(lease, reward, text))
        return len(leases)


def kit(config: FleetConfig | None = None, *, queue_limits: QueueLimits | None = None, **changes: Any) -> Kit:
    config = config or fleet()
    queues = {run: MemoryQueue(run, queue_limits or QueueLimits()) for run in ("default", "other", "stranger")}
    board, backend = BoardStub([heartbeat()], ["default", "other"]), EchoBackend()
    settings: dict[str, Any] = {
        "board": board,
        "queue": queues.__getitem__,
        "backend": backend,
        "tokenizer": WordTokenizer(),
        "durability": "always",
        **changes,
    }
    return Kit(config, queues, board, backend, assemble(config, **settings))


def scored(lease: Lease, reward: float, text: str = "answer") -> Group:
    n = lease.request.n
    segment = Segment(
        prompt_ids_P=np.asarray(lease.request.prompt_ids, np.int32),
        response_ids_T=np.asarray([4, 5, 6], np.int32),
        behavior_logprobs_T=np.asarray([-0.5, -0.25, -0.125], np.float32),
        version_spans=(VersionSpan(6, 0, 1), VersionSpan(7, 1, 3)),
        loss_mask_T=np.ones(3, np.uint8),
        finish_reason=FinishReason.STOP,
    )
    return Group(
        samples_G=tuple(Sample((segment,), f"{text} {i}") for i in range(n)),
        rewards_G=(reward,) * n,
        breakdown_G=({"exact": reward},) * n,
        replica="r1",
        timings=Timings(1.0, 0.1, 0.01),
    )


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state under test announces nothing
            await asyncio.sleep(0)
