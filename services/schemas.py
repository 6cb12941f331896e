"""Bodies of the rollout API, as they are documented in /openapi.json."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema, model_validator

from rollout.types import MIN_TEMPERATURE
from services.strict_body import StrictBody

_MAX_TOKEN_ID = 2**31 - 1
_PROMPT_SCHEMA = {
    "title": "Prompt",
    "description": "Text, chat messages, or token ids.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string", "minLength": 1}, "content": {"type": "string"}},
            },
        },
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID}},
    ],
}


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and bool(value["role"])
        and isinstance(value.get("content"), str)
    )


def _check_prompt(value: Any) -> Any:
    if value in ("", []):
        raise ValueError("a prompt must not be empty")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and (all(map(_is_token, value)) or all(map(_is_message, value))):
        return value
    raise ValueError(
        "a prompt is text, a list of messages with text in role and content, or a list of token ids "
        f"from 0 to {_MAX_TOKEN_ID}"
    )


def _check_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, to which vLLM raises what is less")
    return value


TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
Temperature = Annotated[float, AfterValidator(_check_temperature)]
PromptInput = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Metadata = dict[str, Any]
Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class _Body(StrictBody):
    model_config = ConfigDict(frozen=True)


class SamplingBody(_Body):
    """Only settings with which a sample that is cut and resumed keeps its distribution."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Most response tokens of one sample; 256 where it is left out, or the operator's limit or what the model has room
    for beside the prompt, whichever is least."""
    temperature: Temperature = Field(default=1.0, ge=0, le=2)
    """0 is greedy; between 0 and 0.01 there is none, because the engine would sample at 0.01."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=_MAX_TOKEN_ID)
    """0 keeps every token."""
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64, fail_fast=True)
    seed: int | None = Field(default=None, ge=0, lt=2**63)


class RewardBody(_Body):
    """A reward function by the name the operator gave it."""

    name: str = Field(min_length=1, max_length=63)
    params: dict[str, Any] = Field(default_factory=dict)


class SubmitBody(_Body):
    """Body of POST /v1/rollouts: one group of `n` samples for every prompt."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prompts": ["doorlike ->\n", "harvest ->\n"],
                    "n": 8,
                    "sampling": {"max_tokens": 13, "temperature": 1.0},
                    "reward": {"name": "exact_match", "params": {}},
                    "metadata": [{"answer": "ekilrood"}, {"answer": "tsevrah"}],
                },
                {"prompt": [{"role": "user", "content": "Say hello."}], "n": 2, "sampling": {"max_tokens": 16}},
            ]
        }
    )

    prompts: Annotated[list[PromptInput], Field(fail_fast=True, min_length=1)] | None = None
    prompt: PromptInput | None = None
    """Short for a list of one."""
    n: int = Field(default=1, ge=1)
    """Samples of each prompt."""
    sampling: SamplingBody = SamplingBody()
    reward: RewardBody | None = None
    purpose: Literal["train", "eval", "collect"] = "collect"
    """`train` goes to the run's trainer and needs a reward; the samples of the others are only read here."""
    metadata: Metadata | Annotated[list[Metadata], Field(fail_fast=True)] = Field(default_factory=dict)
    """For all prompts, or one for each; given to the reward function and returned with the samples."""
    run: Label | None = None
    """One of the fleet's runs; the fleet's own by default."""
    tenant: Label = "default"
    deadline_s: float | None = Field(default=None, gt=0, le=604_800)
    """Groups that no engine took within this time are dead; it starts when they are accepted."""

    @model_validator(mode="after")
    def _consistent(self) -> "SubmitBody":
        if (self.prompts is None) == (self.prompt is None):
            raise ValueError("exactly one of prompts and prompt is needed")
        if isinstance(self.metadata, list) and len(self.metadata) != len(self.all_prompts):
            raise ValueError(
                f"metadata: a list of {len(self.metadata)} does not fit {len(self.all_prompts)} prompts; "
                "give one object, or one for each prompt"
            )
        if self.purpose == "train" and self.reward is None:
            raise ValueError("reward: required for purpose train")
        return self

    @property
    def all_prompts(self) -> list[Any]:
        return self.prompts if self.prompts is not None else [self.prompt]

    def metadata_of(self, index: int) -> Metadata:
        return self.metadata[index] if isinstance(self.metadata, list) else self.metadata


class Links(BaseModel):
    """Paths of one submission."""

    self: str
    samples: str
    stream: str


class Submitted(BaseModel):
    """Answer to an accepted submission: it is kept, whatever happens next."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "default~9f0c2c7d1b7e4a55",
                    "run": "default",
                    "group_ids": ["9f0c2c7d1b7e4a55-0", "9f0c2c7d1b7e4a55-1"],
                    "replayed": False,
                    "links": {
                        "self": "/v1/rollouts/default~9f0c2c7d1b7e4a55",
                        "samples": "/v1/rollouts/default~9f0c2c7d1b7e4a55/samples",
                        "stream": "/v1/rollouts/default~9f0c2c7d1b7e4a55/samples?stream=ndjson",
                    },
                }
            ]
        }
    )

    id: str
    run: str
    group_ids: list[str]
    replayed: bool
    """True when this Idempotency-Key had been accepted before; nothing new was queued."""
    links: Links


class GroupView(BaseModel):
    """Where one group is."""

    group_id: str
    index: int
    """Place of its prompt in the submission."""
    state: str
    """queued, leased, experience, trained, delivered, filtered, stale, dead, cancelled, or expired."""
    attempt: int
    reason: str | None


class RolloutView(BaseModel):
    """A submission: how many groups are in which state, and a page of them."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "default~9f0c2c7d1b7e4a55",
                    "run": "default",
                    "total": 2,
                    "counts": {"delivered": 1, "leased": 1},
                    "done": False,
                    "groups": [
                        {
                            "group_id": "9f0c2c7d1b7e4a55-0",
                            "index": 0,
                            "state": "delivered",
                            "attempt": 1,
                            "reason": None,
                        }
                    ],
                    "next_cursor": "1",
                }
            ]
        }
    )

    id: str
    run: str
    total: int
    counts: dict[str, int]
    done: bool
    """Every group has its samples or its end."""
    groups: list[GroupView]
    next_cursor: str | None


class VersionSpanView(BaseModel):
    """Response tokens [start, stop) were sampled by this policy version."""

    version: int
    start: int
    stop: int


class SegmentView(BaseModel):
    """One token sequence of a sample."""

    prompt_ids: list[int]
    response_ids: list[int]
    behavior_logprobs: list[float]
    """Of the distribution that sampled, one per response token, nats."""
    version_spans: list[VersionSpanView]
    finish_reason: str


class SampleView(BaseModel):
    """One sample with its reward."""

    index: int
    text: str
    reward: float
    breakdown: dict[str, float]
    segments: list[SegmentView]
    """One for a plain completion."""


class GroupSamples(GroupView):
    """A group with its samples; empty while it is unfinished, and where it ended without any."""

    samples: list[SampleView]


class SamplesPage(BaseModel):
    """Groups in the order of the prompts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "default~9f0c2c7d1b7e4a55",
                    "groups": [
                        {
                            "group_id": "9f0c2c7d1b7e4a55-0",
                            "index": 0,
                            "state": "delivered",
                            "attempt": 1,
                            "reason": None,
                            "samples": [
                                {
                                    "index": 0,
                                    "text": "ekilrood",
                                    "reward": 1.0,
                                    "breakdown": {},
                                    "segments": [
                                        {
                                            "prompt_ids": [5, 8],
                                            "response_ids": [9, 1],
                                            "behavior_logprobs": [-0.1, -0.02],
                                            "version_spans": [{"version": 7, "start": 0, "stop": 2}],
                                            "finish_reason": "stop",
                                        }
                                    ],
                                }
                            ],
                        }
                    ],
                    "next_cursor": None,
                    "done": True,
                }
            ]
        }
    )

    id: str
    groups: list[GroupSamples]
    next_cursor: str | None
    """None on the last page."""
    done: bool
    """Every group of this page has its samples or its end; where the page is empty, every group of the submission."""


class Cancelled(BaseModel):
    """Answer to DELETE: groups that had not been generated yet are cancelled, the others keep their samples."""

    id: str
    cancelled: int
    total: int
