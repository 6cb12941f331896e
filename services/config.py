"""Settings of the fleet: engines, gateway, autoscaling."""

from typing import Literal
from zoneinfo import ZoneInfo

from pydantic import Field, SecretStr, field_validator, model_validator

from rollout.config import ModelConfig, Name, RedisConfig, RewardsConfig, Settings
from services.lending_calendar import LendWindow, overlapping

_TAKEN = {
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enforce_eager": "engine.compile",
    "model": "model.path",
    "tokenizer": "model.path",
    "served_model_name": "model.name",
    "scheduling_policy": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
}
"""vLLM arguments that `engine.extra` may not give, and the setting to use instead. "" is where Nightshift relies on its
own value: users before rollouts, logprobs of the distribution that sampled, pushes into the workers."""


class EngineConfig(Settings):
    """One vLLM engine."""

    device: Literal["cpu", "gpu"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576)
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Seats."""
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
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
    """Further vLLM engine arguments, passed as they are; those that have a setting of their own are refused. With
    `enable_auto_tool_choice = true` and `tool_call_parser` users' chats may give `tools`."""

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, object]) -> dict[str, object]:
        for name in extra:
            if (knob := _TAKEN.get(name.replace("-", "_"))) is not None:
                remedy = f"use {knob}" if knob else "leave it out: Nightshift relies on the value it gives"
                raise ValueError(f"engine.extra.{name} would override what Nightshift sets; {remedy}")
        return extra


class HarvestConfig(Settings):
    """How rollouts share the engines with users."""

    user_reserve: int = Field(default=4, ge=0)
    """Seats rollouts never take."""
    lease_s: float = Field(default=30.0, gt=1, le=3600)
    poll_s: float = Field(default=0.05, gt=0, le=10)
    """Wait between two looks into an empty queue."""
    max_lag: int = Field(default=4, ge=0)
    """A replica this many versions behind the current one harvests nothing."""
    salvage_tokens: int = Field(default=256, ge=16)
    """A replica that is killed loses at most so many tokens of each sample; more often is more to write to Redis."""
    give_back_s: float = Field(default=2.0, gt=0, le=3600)
    """A leased group that has no seat for so long, because users need them, is left to other replicas."""
    purposes: tuple[Literal["eval", "train", "collect"], ...] = ("eval", "train", "collect")


class PushConfig(Settings):
    """The engine half of a weight push."""

    canary_tolerance: float = Field(default=0.05, gt=0)
    """Mean absolute logprob gap in nats beyond which a version is not verified."""
    rehearsal: bool = True
    """Prove at start, before users come, that a push changes what the engine computes."""
    watchdog_s: float = Field(default=30.0, gt=0)
    """Longest pause of generation for one push."""
    poll_s: float = Field(default=0.05, gt=0, le=10)
    staging_dir: str = "/dev/shm"  # noqa: S108 - shared memory is the point; each user has a 0700 directory in it
    collective: bool = True
    """False takes every version from the artefact."""


class AutoscalingConfig(Settings):
    """Replicas of the engine."""

    min_replicas: int = Field(default=1, ge=1, le=1024)
    max_replicas: int = Field(default=1, ge=1, le=1024)
    target_ongoing_requests: float = Field(default=8.0, gt=0)
    """User requests in flight per replica."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}")
        return self


class SharingConfig(Settings):
    """How users and rollouts share the engines."""

    mode: Literal["live", "lend"] = "live"
    """live: every engine serves users with the newest policy and harvests in the seats they leave free. lend: users
    have a production model, and whole replicas that they do not need swap to the policy and back, see `lending`."""


class LendingConfig(Settings):
    """When whole replicas go to rollouts, with `sharing.mode = "lend"`."""

    production: ModelConfig | None = None
    """What users are served: path and name. Of the policy's architecture, tokenizer and chat template."""
    timezone: str = "UTC"
    """Of the calendar, such as Europe/Berlin."""
    calendar: tuple[LendWindow, ...] = ()
    """Windows {days, start, end, replicas}; nothing is lent outside of them. Without any, lending knows no hours."""
    min_serving: int = Field(default=1, ge=1, le=1024)
    """Replicas that are never lent."""
    headroom: float = Field(default=1.25, ge=1, le=100)
    """A replica is lent only if the others could serve the forecast times this, at autoscaling.target_ongoing_requests
    each; it is called back where they cannot serve the forecast itself."""
    lend_after_s: float = Field(default=60.0, ge=0, le=86_400)
    """A replica is lent when users have not needed it for so long."""
    quiet_s: float = Field(default=300.0, ge=0, le=86_400)
    """Least time between a change of how many are lent and lending more."""
    min_gain: float = Field(default=3.0, ge=0)
    """Tokens that lending must promise to harvest for each token that the two swaps cost."""
    tokens_per_s: float = Field(default=100.0, gt=0)
    """Expected harvest of a lent replica, until it is measured."""
    switch_s: float = Field(default=30.0, gt=0)
    """Expected time of both swaps together, until it is measured."""
    drain_s: float = Field(default=120.0, gt=0)
    """A user who is not through after so long keeps the replica."""
    enter_s: float = Field(default=120.0, gt=0)
    """A lent replica without verified weights after so long goes back to users."""
    reclaim_s: float = Field(default=120.0, gt=0)
    """A replica that is not back with users after so long is replaced."""
    rest_s: float = Field(default=60.0, ge=0)
    """A replica that could not be lent is left alone for so long."""
    wish_s: float = Field(default=10.0, ge=1, le=600)
    """A lent replica that hears nothing of the gateway's decision for so long goes back to users."""
    poll_s: float = Field(default=0.05, gt=0, le=10)

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{name!r} is no time zone of this machine") from error
        return name

    @model_validator(mode="after")
    def _one_number_at_a_time(self) -> "LendingConfig":
        if found := overlapping(self.calendar):
            raise ValueError(f"calendar: {found[0]} and {found[1]} overlap; give windows that follow each other")
        return self


class LimitsConfig(Settings):
    """What one request may ask for; more is refused with 413 or 422."""

    max_body_bytes: int = Field(default=4_194_304, ge=1024)
    max_prompts: int = Field(default=1024, ge=1)
    """Groups in one POST /v1/rollouts."""
    max_n: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=1024, ge=1)
    """Response tokens of one sample; also bounded by max_model_len minus the prompt."""
    max_metadata_bytes: int = Field(default=16_384, ge=0)
    max_depth: int = Field(default=65_536, ge=1)
    """Groups of a run that are not at their end."""
    max_failures: int = Field(default=4, ge=1)
    retain_s: int = Field(default=3600, ge=1)
    max_user_requests: int = Field(default=256, ge=1)
    """User requests in flight at the gateway; more get 429."""
    page_size: int = Field(default=256, ge=1, le=4096)
    max_streams: int = Field(default=64, ge=1)
    """Streams of samples open at the gateway; more get 429."""
    max_stream_s: float = Field(default=3600.0, gt=0)
    """Longest time that one stream waits for its groups."""


class AuthConfig(Settings):
    """Bearer tokens. `nightshift serve` makes those that stand neither here nor in its environment, and keeps them in
    the state directory; a deployment on a cluster makes none, needs at least one, and grants no role without one."""

    user: SecretStr | None = None
    """May use the OpenAI routes. NIGHTSHIFT_USER_TOKEN."""
    rollout: SecretStr | None = None
    """May also submit, read and cancel rollouts. NIGHTSHIFT_ROLLOUT_TOKEN."""
    admin: SecretStr | None = None
    """May do everything, /v1/status and /metrics included. NIGHTSHIFT_ADMIN_TOKEN."""


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
    push: PushConfig = PushConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    sharing: SharingConfig = SharingConfig()
    lending: LendingConfig = LendingConfig()
    gateway: GatewayConfig = GatewayConfig()

    @model_validator(mode="after")
    def _can_lend(self) -> "FleetOptions":
        if self.sharing.mode != "lend":
            return self
        if self.lending.production is None:
            raise ValueError("sharing.mode=lend needs lending.production.path, the model that users are served")
        serving, most = self.lending.min_serving, self.autoscaling.max_replicas
        if serving >= most:
            raise ValueError(f"lending.min_serving={serving} leaves none of autoscaling.max_replicas={most} to lend")
        return self

    @model_validator(mode="after")
    def _seats(self) -> "FleetOptions":
        reserve, seats = self.harvest.user_reserve, self.engine.max_num_seqs
        if reserve >= seats:
            raise ValueError(
                f"harvest.user_reserve={reserve} leaves no seat of engine.max_num_seqs={seats} for rollouts"
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
