"""Settings of the fleet: engines, gateway, autoscaling."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from rollout.config import ModelConfig, Name, RedisConfig, RewardsConfig, Settings
from services.autoscaling.windows import overlapping, window
from services.engine_extra import check_extra
from services.lending_config import LendingConfig
from services.push_config import PushConfig
from services.slo import SloConfig
from services.time_zone import TimeZone

_PUSH_PAUSES_AND_CHECKS, _BESIDE_S = 2, 7.0
"""Of a push under way when its replica is called back: what `push.watchdog_s` bounds (the preparation is given up), and
the most seconds that it waits besides, for rollouts that step aside and for users' first tokens."""


class EngineConfig(Settings):
    """One vLLM engine."""

    device: Literal["cpu", "gpu"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576)
    """Tokens of prompt and answer together."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Seats."""
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    """Tokens that one step computes; None is vLLM's own default."""
    long_prefill_token_threshold: int | None = Field(default=None, ge=16)
    """Prompt tokens of one request that a step computes beside other requests; without it all that fit into the step,
    and a user who comes with the long prompt of a rollout waits for it."""
    first_token_steps: int = Field(default=4, ge=0, le=1024)
    """Most steps in a row that are without rollouts while users' prompts are computed, on an engine whose full step
    takes half as long again as that of one sequence; 0 for none."""
    stream_every_s: float = Field(default=0.05, ge=0, le=10)
    """Seconds between two pieces of a streamed answer, of which each costs gateway and client as much as a token; the
    first token goes at once."""
    kv_cache_gib: int = Field(default=1, ge=1, le=1024)
    """CPU only: whole GiB of KV cache."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    omp_threads_bind: str = "nobind"
    """CPU only: cores of an engine; the default lets the kernel place threads."""
    cpus: float = Field(default=0.5, ge=0)
    """Ray CPUs that a replica reserves."""
    compile: bool | None = None
    """torch.compile and graph capture at start. By default on a GPU only: on a CPU it costs half a minute of start and
    brings no more tokens a second."""
    extra: dict[str, object] = Field(default_factory=dict)
    """Further vLLM engine arguments, passed as they are; those that have a setting of their own are refused, and those
    that would run or read what others choose. With `enable_auto_tool_choice = true` and `tool_call_parser` users' chats
    may give `tools`."""

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, object]) -> dict[str, object]:
        check_extra(extra)
        return extra


class HarvestConfig(Settings):
    """How rollouts share the engines with users."""

    user_reserve: int = Field(default=4, ge=0)
    """Seats rollouts never take."""
    max_seats: int | None = Field(default=None, ge=0)
    """Most seats that rollouts take, however few users there are; without it all but the reserve."""
    preempt: bool = True
    """Users who find no seat free get that of the newest rollout. Without it they wait until a rollout ends."""
    prefill_tokens: int = Field(default=512, ge=1)
    """Most prompt tokens of rollouts that the engine computes at a time: users wait for each of its steps. Fewer where
    the idle engine is seen to be slow with them. A larger prompt is computed alone."""
    lease_s: float = Field(default=30.0, gt=1, le=3600)
    retry_s: float = Field(default=1.0, ge=0, le=60)
    """Before a group whose reward or request failed is given back, and twice as long each further time, up to 16 times
    that: a reward service that is away for a while costs no group."""
    poll_s: float = Field(default=0.05, gt=0, le=10)
    """Wait between two looks into an empty queue."""
    max_lag: int = Field(default=4, ge=0)
    """A replica this many versions behind the current one harvests nothing."""
    salvage_tokens: int = Field(default=256, ge=16)
    """A replica that is killed loses at most so many tokens of each sample, while Redis answers within the time that a
    sample takes for three eighths of them, and at up to 25 times as many tokens a second. Fewer is more to write."""
    give_back_s: float = Field(default=2.0, gt=0, le=3600)
    """A leased group that has no seat for so long, because users need them, is left to other replicas."""
    purposes: tuple[Literal["eval", "train", "collect"], ...] = ("eval", "train", "collect")
    """Of the groups that are leased, in this order."""

    @field_validator("purposes")
    @classmethod
    def _some(cls, purposes: tuple[str, ...]) -> tuple[str, ...]:
        if not purposes:
            raise ValueError(
                "harvest.purposes=[] leaves rollouts that are accepted to no replica; name one of eval, train and"
                " collect at least (harvest.max_seats=0 stops the harvest, where sharing.mode is not lend)"
            )
        return purposes


class SharingConfig(Settings):
    """What users and rollouts compute with on one engine."""

    mode: Literal["live", "adapter", "lend"] = "live"
    """live: both with the newest version. adapter: rollouts with the newest LoRA adapter, users with `model.path` or
    with an adapter of their own; the run has to train one and publish it alone (`train.lora.publish = "adapter"`).
    lend: users have a production model, and whole replicas that they do not need swap to the newest version and back,
    see `lending`."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Largest rank of an adapter, of `adapter` alone. An engine's memory for adapters grows with it."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the layers that adapters may change, of `adapter` alone: all that runs train
    (`train.lora.target_modules`), for each costs users' requests a little too."""
    rollout_adapters: int = Field(default=2, ge=2, le=16)
    """Versions that rollouts can be on at once, of `adapter` alone: one in use, one being loaded, and more where
    samples may stay on the version that they began with although further ones came."""
    user_adapter: Path | None = None
    """A PEFT directory that users get instead of `model.path` itself; it has a place of its own beside
    `rollout_adapters`."""

    @model_validator(mode="after")
    def _adapters(self) -> "SharingConfig":
        if self.user_adapter is not None and self.mode != "adapter":
            raise ValueError(
                f"sharing.user_adapter={self.user_adapter} needs sharing.mode=adapter, which is {self.mode}"
            )
        return self

    @field_validator("max_lora_rank", mode="before")
    @classmethod
    def _number(cls, rank: object) -> object:
        """Flags and the environment give text, of which a Literal makes no number."""
        return int(rank) if isinstance(rank, str) and rank.isdecimal() else rank

    @field_validator("target_modules")
    @classmethod
    def _inner_layers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [name for name in names if "head" in name or "embed" in name]
        if wrong or not names:
            raise ValueError(
                f"sharing.target_modules={','.join(names)} names {', '.join(wrong) or 'nothing'}: adapters are for"
                " layers inside the model, and with one on the output layer vLLM fails on the logprobs of prompts, by"
                " which versions are checked"
            )
        return names

    @property
    def max_loras(self) -> int:
        """Places for adapters in an engine; 0 where it takes none."""
        return 0 if self.mode != "adapter" else self.rollout_adapters + (self.user_adapter is not None)


class HealthConfig(Settings):
    """How a replica knows that its engine lives."""

    look_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two looks at the engine's count of steps."""
    probe_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds. An engine that has nothing to do is asked for one token so often."""
    suspect_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds. With work and without a step for so long, an engine harvests nothing until it takes one."""
    dead_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds. With work and without a step for so long, it is replaced: more than its longest step."""

    @model_validator(mode="after")
    def _ordered(self) -> "HealthConfig":
        if 2 * self.look_s > self.suspect_s:
            raise ValueError(f"suspect_s={self.suspect_s} is less than two looks of look_s={self.look_s}")
        if self.suspect_s >= self.dead_s:
            raise ValueError(f"suspect_s={self.suspect_s} is not below dead_s={self.dead_s}")
        return self


class RolloutBudgetConfig(Settings):
    """Replicas that rollouts may add to those that users need, while their work finds no seat."""

    windows: tuple[str, ...] = Field(min_length=1)
    """Of every day, such as "22:00-06:00"; at a window's end its replicas are given back at once."""
    time_zone: TimeZone = "UTC"
    """Of the windows and of the day of `replica_hours_per_day`, such as Europe/Berlin."""
    extra_replicas: int = Field(ge=1, le=1024)
    """The most at once, within `max_replicas`."""
    replica_hours_per_day: float | None = Field(default=None, gt=0)
    """The most of a day, extra replicas x hours; None leaves it to the windows."""

    @field_validator("windows")
    @classmethod
    def _apart(cls, windows: tuple[str, ...]) -> tuple[str, ...]:
        if pair := overlapping([window(text) for text in windows]):
            raise ValueError(f"windows {pair[0]} and {pair[1]} overlap")
        return windows


class AutoscalingConfig(Settings):
    """Replicas of the engine: as many as users need, however many rollouts run beside them. See docs/autoscaling.md."""

    min_replicas: int = Field(default=1, ge=1, le=1024)
    """Those that run though no user comes."""
    max_replicas: int = Field(default=1, ge=1, le=1024)
    """Those that rollouts add included."""
    target_utilisation: float = Field(default=0.6, gt=0, le=1)
    """Share of what an engine does with all its seats busy that users are to take of it on average."""
    hysteresis: float = Field(default=0.15, ge=0, le=1)
    """A replica goes only when the others would not be above `target_utilisation` with so much more load either."""
    rate_window_s: float = Field(default=30.0, ge=5, le=3600)
    """Over which arrivals are counted."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    """Replicas are added when users have needed them for so long."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """Replicas are taken away when users have not needed them for so long."""
    drain_s: float = Field(default=60.0, ge=0, le=3600)
    """Most time that users' answers have to end on a replica that is stopped; then they are cut."""
    rollout_budget: RolloutBudgetConfig | None = None
    """None: rollouts never add a replica."""

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}")
        if self.downscale_delay_s < self.rate_window_s:
            raise ValueError(
                f"downscale_delay_s={self.downscale_delay_s:g} is below rate_window_s={self.rate_window_s:g}, for "
                "which the arrivals at a replica that was taken away are missing"
            )
        budget, room = self.rollout_budget, self.max_replicas - self.min_replicas
        if budget is not None and budget.extra_replicas > room:
            raise ValueError(
                f"rollout_budget.extra_replicas={budget.extra_replicas} is more than the {room} between "
                f"min_replicas={self.min_replicas} and max_replicas={self.max_replicas}"
            )
        return self


class LimitsConfig(Settings):
    """What one request may ask for; more is refused: with 400 by the OpenAI routes, 422 by the rollout API, 413 where
    the body is too large, 429 where too much is under way."""

    max_body_bytes: int = Field(default=4_194_304, ge=1024)
    max_prompts: int = Field(default=1024, ge=1)
    """Groups in one POST /v1/rollouts."""
    max_n: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=1024, ge=1)
    """Response tokens of one sample; also bounded by max_model_len minus the prompt."""
    max_prompt_chars: int | None = Field(default=None, ge=1)
    """Characters of one prompt, messages and tools included; more are refused before they are tokenised. By default 16
    for each token of `engine.max_model_len`."""
    max_grammar_chars: int = Field(default=16_384, ge=256)
    """Of a `response_format` or of one tool, as JSON: engines compile a grammar of it."""
    max_grammar_depth: int = Field(default=32, ge=4, le=64)
    """Of objects and arrays in one another, in the same."""
    max_metadata_bytes: int = Field(default=16_384, ge=0)
    """Of one prompt, as JSON."""
    max_depth: int = Field(default=65_536, ge=1)
    """Groups of a run that are not at their end."""
    max_failures: int = Field(default=4, ge=1)
    """Attempts at a group that fail until it is dead."""
    retain_s: int = Field(default=3600, ge=1)
    """Samples stay readable for so long after their group's end."""
    dead_retain_s: int = Field(default=86_400, ge=1)
    """Those of a dead group, where it is longer: until then `nightshift dead retry` can have it tried again."""
    max_user_requests: int = Field(default=256, ge=1)
    """User requests in flight at the gateway; more get 429."""
    max_rollout_requests: int = Field(default=128, ge=1)
    """Requests to the rollout API in flight at the gateway, streams apart; more get 429."""
    max_token_requests: int | None = Field(default=None, ge=1)
    """Of each of these two with one token; more get 429. By default seven eighths, rounded up, so that whoever has one
    token leaves room for those with another."""
    requests_per_s: float = Field(default=0.0, ge=0)
    """Requests a second with one token, and as many (one at least) at once; more get 429. 0 for any number."""
    page_size: int = Field(default=256, ge=1, le=4096)
    """Groups in one answer."""
    max_streams: int = Field(default=64, ge=1)
    """Streams of samples open at the gateway; more get 429."""
    max_stream_s: float = Field(default=3600.0, gt=0)
    """Longest time that one stream waits for its groups."""

    def of_one_token(self, places: int) -> int:
        """How many of so many places in flight."""
        return -(-7 * places // 8) if self.max_token_requests is None else min(self.max_token_requests, places)

    @property
    def places(self) -> int:
        """Requests in flight that may last."""
        return self.max_user_requests + self.max_rollout_requests + self.max_streams


class AuthConfig(Settings):
    """Bearer tokens. `nightshift serve` makes those that stand neither here nor in its environment, and keeps them in
    the state directory; a deployment on a cluster makes none, needs at least one, and grants no role without one."""

    user: SecretStr | None = None
    """May use the OpenAI routes. NIGHTSHIFT_USER_TOKEN."""
    rollout: SecretStr | None = None
    """May also submit, read and cancel rollouts. NIGHTSHIFT_ROLLOUT_TOKEN."""
    admin: SecretStr | None = None
    """May do everything, /v1/status and /metrics included. NIGHTSHIFT_ADMIN_TOKEN."""
    metrics: SecretStr | None = None
    """May read /metrics and nothing else. NIGHTSHIFT_METRICS_TOKEN."""
    file: Path | None = None
    """JSON, mode 0600, with those of the four that do not stand above: {"user": "...", "admin": "..."}. The gateway
    reads it itself, so on a cluster it has to be on every node, and nothing of Ray's sees a token."""


class GatewayConfig(Settings):
    """The one HTTP door."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65_535)
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()


class FleetOptions(Settings):
    """What only the fleet needs to know."""

    engine: EngineConfig = EngineConfig()
    harvest: HarvestConfig = HarvestConfig()
    sharing: SharingConfig = SharingConfig()
    slo: SloConfig = SloConfig()
    push: PushConfig = PushConfig()
    health: HealthConfig = HealthConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    lending: LendingConfig = LendingConfig()
    gateway: GatewayConfig = GatewayConfig()

    @model_validator(mode="after")
    def _can_lend(self) -> "FleetOptions":
        if self.sharing.mode != "lend":
            if (production := self.lending.production) is not None:
                raise ValueError(
                    f"lending.production.path={production.path} needs sharing.mode=lend, which is {self.sharing.mode}:"
                    " users would be served the policy"
                )
            return self
        if self.lending.production is None:
            raise ValueError("sharing.mode=lend needs lending.production.path, the model that users are served")
        watchdog_s, reclaim_s = self.push.watchdog_s, self.lending.reclaim_s
        if reclaim_s < (most_s := _PUSH_PAUSES_AND_CHECKS * watchdog_s + _BESIDE_S):
            raise ValueError(
                f"lending.reclaim_s={reclaim_s:g} is less than the {most_s:g} s that a push may take which is under way"
                f" when its replica is called back (twice push.watchdog_s={watchdog_s:g}, and {_BESIDE_S:g}): the"
                " replica would be ended"
            )
        serving, most = self.lending.min_serving, self.autoscaling.max_replicas
        if serving >= most:
            raise ValueError(f"lending.min_serving={serving} leaves none of autoscaling.max_replicas={most} to lend")
        if self.harvest.max_seats == 0:
            raise ValueError(
                "sharing.mode=lend takes whole replicas from users, for which harvest.max_seats=0 leaves rollouts no"
                " seat; set it to 1 or more"
            )
        per_replica, seats = self.lending.requests_per_replica, self.engine.max_num_seqs
        if per_replica > seats and "requests_per_replica" not in self.lending.model_fields_set:
            raise ValueError(
                f"lending.requests_per_replica={per_replica:g}, by default, is more than engine.max_num_seqs={seats}:"
                " users would wait for a seat while other replicas are lent; set it to what one replica is to serve"
            )
        if (budget := self.autoscaling.rollout_budget) is not None:
            raise ValueError(
                f"autoscaling.rollout_budget.extra_replicas={budget.extra_replicas} adds replicas that begin with"
                " users, beside whom sharing.mode=lend gives rollouts no seat; put those that are to be lent into"
                " autoscaling.min_replicas"
            )
        return self

    @model_validator(mode="after")
    def _seats(self) -> "FleetOptions":
        reserve, seats = self.harvest.user_reserve, self.engine.max_num_seqs
        if reserve >= seats:
            raise ValueError(
                f"harvest.user_reserve={reserve} leaves no seat of engine.max_num_seqs={seats} for rollouts"
            )
        if self.slo.guards and not self.harvest.preempt:
            raise ValueError(
                f"slo.ttft_s={self.slo.ttft_s}, tpot_s={self.slo.tpot_s} cannot be kept with harvest.preempt=false: a"
                " miss that lasts takes seats from rollouts"
            )
        return self


class FleetConfig(FleetOptions):
    """Everything `services.app:build` needs."""

    fleet: Name = "fleet"
    run: Name = "default"
    """Run that HTTP rollouts belong to unless they name another registered one."""
    model: ModelConfig
    redis: RedisConfig = RedisConfig()
    rewards: RewardsConfig = RewardsConfig()

    @property
    def lends(self) -> bool:
        return self.sharing.mode == "lend"

    @property
    def served(self) -> ModelConfig:
        """The model that users are served, and every engine starts with."""
        production = self.lending.production if self.lends else None
        return production or self.model
