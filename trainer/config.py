"""Settings of a training run."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rollout.config import ModelConfig, Name, RedisConfig, Settings
from trainer.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from trainer.lora_config import LoraConfig
from trainer.partition import Packing
from trainer.task_config import PromptsConfig, RewardUse, SamplingConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
Role = Literal["policy", "critic", "reference", "reward"]


class StalenessConfig(Settings):
    """How far generation may run ahead, and how old a sample may be when it trains."""

    eta: int = Field(default=1, ge=0, le=64)
    """Generation may run ahead of training by eta + 1 batches."""
    max_age: int = Field(default=4, ge=0)
    """Versions between a sample's oldest trained token and now; older samples are masked."""
    min_group_samples: int = Field(default=2, ge=1)
    """Fewer survivors make the group stale."""


class OptimizerConfig(Settings):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of the two running means, each >= 0 and < 1."""
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)


class WorkersConfig(Settings):
    """The processes of a group of workers."""

    world_size: int = Field(default=1, ge=1, le=1024)
    zero_stage: int = Field(default=0, ge=0, le=3)
    """DeepSpeed shards over the workers: 1 the optimizer, 2 gradients too, 3 weights too; 0 nothing."""
    offload_optimizer: bool = False
    """Optimizer state and float32 master weights in the host's memory, not the device's; needs zero_stage >= 1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    gradient_checkpointing: bool = False
    cpus: float = Field(default=0.5, ge=0)
    """Ray CPUs that a worker reserves."""
    threads: int = Field(default=1, ge=1)
    """torch threads of a worker."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=16)
    """Padding counts, except where rows are packed."""
    packing: Packing = "auto"
    """The rows of a micro-batch as one sequence without padding, attention kept within each. auto: where the model's
    attention supports it and at least a tenth of a batch would be padding."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """For the cluster to place the workers of a group, and again for them to load the model."""


def _check_master_weights(workers: WorkersConfig) -> None:
    """Of workers that train; those of a frozen model have no optimizer. Raises ValueError."""
    if workers.zero_stage == 0:
        if workers.dtype == "bfloat16":
            raise ValueError("dtype=bfloat16 needs zero_stage=1, 2 or 3, which keep float32 master weights; it is 0")
        if workers.offload_optimizer:
            raise ValueError("offload_optimizer=true needs zero_stage=1, 2 or 3, which know how to; it is 0")


class CriticConfig(Settings):
    """The trained value model that advantage=gae needs."""

    path: Path | None = None
    """A causal language model, whose value head begins at 0, or a sequence classifier of one label, both with the
    policy's tokenizer; None is model.path."""
    optimizer: OptimizerConfig = OptimizerConfig()
    workers: WorkersConfig | None = None
    """None is as train.workers. The rows of a critic are padded, whatever packing says."""
    epochs: int | None = Field(default=None, ge=1, le=64)
    """Passes over a batch, in the policy's minibatches; None is algorithm.ppo_epochs."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move within a step before its loss stops falling; None is as far as it likes."""
    loss_coef: float = Field(default=1.0, gt=0)
    """Of the value loss. AdamW hardly sees it; optimizer.grad_clip does."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps that train the critic alone: the policy is published again as it is."""

    @field_validator("workers")
    @classmethod
    def _master_weights(cls, workers: WorkersConfig | None) -> WorkersConfig | None:
        if workers is not None:
            _check_master_weights(workers)
        return workers


class RewardModelConfig(Settings):
    """A frozen sequence classifier of one label, whose score of each sample joins the verifier's reward."""

    path: Path
    """With a tokenizer of its own: where its vocabulary is not the policy's, samples are decoded and encoded anew."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Of the score in the reward."""
    verifier_weight: float = Field(default=1.0, allow_inf_nan=False)
    """Of the verifier's reward in the reward; 0 leaves it out."""
    max_length: int | None = Field(default=None, ge=8)
    """Longer samples lose their beginning; None is the model's context."""
    chat_template: bool = False
    """Prompt and response as a user's and an assistant's message in the reward model's own template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    workers: WorkersConfig | None = None
    """None is as train.workers; of what concerns training (dtype, zero_stage) nothing is used."""

    @model_validator(mode="after")
    def _counts(self) -> "RewardModelConfig":
        if self.weight == 0:
            raise ValueError(f"reward_model.weight=0 leaves {self.path} out of the reward: remove [train.reward_model]")
        return self


class PushConfig(Settings):
    """The trainer half of a weight push."""

    collective: bool = True
    """False lets replicas take every version from the artefact."""
    backend: Literal["gloo", "nccl"] = "gloo"
    host: str = "127.0.0.1"
    """Address, of the node where the policy's first worker runs, that replicas reach."""
    invite_s: float = Field(default=3.0, gt=0)
    """Longest wait for the live replicas to accept an epoch; it starts as soon as all did. Below form_timeout_s."""
    op_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for one bucket."""
    form_timeout_s: float = Field(default=15.0, gt=0)
    """Longest wait of a replica that accepted for its place in the group, and of each member for the others."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Over everything; then training goes on and stragglers catch up by artefact."""
    bucket_bytes: int = Field(default=268_435_456, ge=4096)
    """Of one bucket, the piece in which weights travel and are checked."""
    canary_sequences: int = Field(default=4, ge=1, le=64)
    """Pieces of the run's prompts, whose logprobs a replica compares with the trainer's to verify a version."""
    canary_tokens: int = Field(default=32, ge=2, le=512)
    """The most of each of them."""
    keep_versions: int = Field(default=4, ge=2)
    """Newest artefacts kept."""

    @model_validator(mode="after")
    def _timeouts(self) -> "PushConfig":
        if self.form_timeout_s <= self.op_timeout_s:
            raise ValueError(f"form_timeout_s={self.form_timeout_s} must be above op_timeout_s={self.op_timeout_s}")
        if self.invite_s >= self.form_timeout_s:
            raise ValueError(
                f"invite_s={self.invite_s} must be below form_timeout_s={self.form_timeout_s}: a replica that accepted"
                " waits no longer than that for the group, which is made when invite_s is over"
            )
        return self


class CheckpointConfig(Settings):
    """What survives a kill."""

    every: int = Field(default=10, ge=1)
    """Steps; up to this many batches stay leased until the checkpoint that contains them."""
    keep: int = Field(default=2, ge=1)


class EvalConfig(Settings):
    """Held-out evaluation through the same engines."""

    every: int = Field(default=0, ge=0)
    """Steps; 0 is at the start and the end only, where `prompts.eval` is given."""
    n: int = Field(default=4, ge=1)
    greedy: bool = True
    """Also one greedy sample a prompt."""
    max_prompts: int = Field(default=256, ge=1)
    hold_s: float = Field(default=300.0, ge=0, le=86_400)
    """During training one of several replicas stays at the evaluated version and generates nothing else, at most so
    long. With 0, after that time or with one replica alone, all generate, and the report states a range of versions."""


class TrainOptions(Settings):
    """What only the trainer needs to know."""

    runs_dir: Path = Path("runs")
    """The run lives in runs_dir/run."""
    seed: int = 0
    steps: int = Field(default=100, ge=1)
    batch_groups: int = Field(default=32, ge=1)
    """Groups a step."""
    prompts: PromptsConfig
    reward: RewardUse
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    staleness: StalenessConfig = StalenessConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    workers: WorkersConfig = WorkersConfig()
    critic: CriticConfig | None = None
    reward_model: RewardModelConfig | None = None
    lora: LoraConfig | None = None
    """None trains every weight."""
    colocations: dict[Name, tuple[Role, ...]] = Field(default_factory=dict)
    """Groups that share their places by name, such as frozen = ["reference", "reward"]: rank r of each runs in one
    bundle of the Ray cluster, on CUDA on one device. All others have places of their own."""
    push: PushConfig = PushConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvalConfig = EvalConfig()
    ray_address: str | None = None
    """Join this Ray cluster; None starts one for the workers alone."""
    health_port: int = Field(default=0, ge=0, le=65_535)
    """Port of /healthz, /metrics and /status on loopback; 0 opens none."""
    writer_ttl_s: float = Field(default=10.0, gt=1, le=600)
    """After a kill another trainer may take the run over this much later."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """So many steps in a row with a non-finite loss or gradient stop the run."""
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """When a worker dies, all are started again from the newest checkpoint: so many times in a row, with no checkpoint
    between them; the next loss ends the trainer with an error."""
    max_dead_batches: int = Field(default=4, ge=1)
    """So many batches' worth of groups that end dead, and none between them that can be trained, stop the run."""
    stall_s: float = Field(default=120.0, gt=0)
    """A warning is logged when no experience arrives for this long."""

    @field_validator("workers")
    @classmethod
    def _master_weights(cls, workers: WorkersConfig) -> WorkersConfig:
        _check_master_weights(workers)
        return workers

    @model_validator(mode="after")
    def _consistent(self) -> "TrainOptions":
        if self.push.backend == "nccl" and self.workers.device == "cpu":
            raise ValueError("push.backend=nccl needs workers.device=cuda, but it is cpu")
        if self.evaluation.every > 0 and self.prompts.eval is None:
            raise ValueError(
                f"evaluation.every={self.evaluation.every} evaluates held-out prompts, but prompts.eval names none:"
                " give them, or set evaluation.every to 0"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> "TrainOptions":
        algorithm, n, max_tokens = self.algorithm, self.sampling.n, self.sampling.max_tokens
        if algorithm.advantage == "gae" and self.critic is None:
            raise ValueError("algorithm.advantage=gae needs the values of a critic, but there is no [train.critic]")
        if algorithm.advantage != "gae" and self.critic is not None:
            raise ValueError(
                f"[train.critic] gives values that algorithm.advantage={algorithm.advantage} does not use: set it to"
                " gae, or leave the critic out"
            )
        if algorithm.dynamic_sampling and self.reward_model is not None:
            raise ValueError(
                "algorithm.dynamic_sampling=true filters groups by the verifier's rewards before"
                f" reward_model={self.reward_model.path} scores them: set it to false, or leave the reward model out"
            )
        if self.critic is not None and self.critic.workers is not None and self.critic.workers.packing == "on":
            raise ValueError("critic.workers.packing=on, but the rows of a critic are padded: use auto or off")
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves none of steps={self.steps} to train the policy"
            )
        if algorithm.advantage in GROUP_ADVANTAGES and n < 2:
            raise ValueError(
                f"algorithm.advantage={algorithm.advantage} compares samples of a group, but sampling.n={n}"
            )
        if algorithm.minibatches > self.batch_groups * n:
            raise ValueError(
                f"algorithm.minibatches={algorithm.minibatches} is above the samples of a step,"
                f" batch_groups={self.batch_groups} x sampling.n={n}"
            )
        if algorithm.overlong_buffer > max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer={algorithm.overlong_buffer} is above sampling.max_tokens={max_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _advantages_differ(self) -> "TrainOptions":
        """A sample that has nothing to be compared with gets advantage 0 whatever its reward."""
        algorithm, least = self.algorithm, self.staleness.min_group_samples
        if least > self.sampling.n:
            raise ValueError(f"staleness.min_group_samples={least} is above sampling.n={self.sampling.n}")
        if algorithm.advantage in GROUP_ADVANTAGES and least < 2:
            raise ValueError(
                f"staleness.min_group_samples={least} trains groups with one fresh sample, which"
                f" algorithm.advantage={algorithm.advantage} compares with no other: it needs 2 or more"
            )
        alone = self.batch_groups * self.sampling.n == 1 and not algorithm.kl_in_reward
        if algorithm.advantage == "reinforce_pp" and alone:
            raise ValueError(
                "algorithm.advantage=reinforce_pp whitens over the samples of a step, of which"
                f" batch_groups={self.batch_groups} x sampling.n={self.sampling.n} leave one: raise batch_groups or"
                " sampling.n, or let tokens differ by a KL in the reward (algorithm.kl_in, kl_coef)"
            )
        return self

    @model_validator(mode="after")
    def _colocations_fit(self) -> "TrainOptions":
        groups, seen = self.group_workers, dict[Role, str]()
        for name, roles in self.colocations.items():
            knob = f"colocations.{name}=[{', '.join(roles)}]"
            if len(roles) < 2:
                raise ValueError(f"{knob}: a colocation is of two groups or more")
            for role in roles:
                if role not in groups:
                    raise ValueError(f"{knob}: this configuration starts no {role} group, only {', '.join(groups)}")
                if role in seen:
                    raise ValueError(f"{knob}: {role} is in colocations.{seen[role]} already")
                seen[role] = name
                for what in ("world_size", "device"):
                    first, other = getattr(groups[roles[0]], what), getattr(groups[role], what)
                    if first != other:
                        raise ValueError(
                            f"{knob}: ranks share a place one to one, but {what} is {first} for {roles[0]} and {other}"
                            f" for {role}"
                        )
        return self

    @property
    def group_knobs(self) -> dict[Role, str]:
        """Where the processes of every group are configured, by role."""
        knobs: dict[Role, str] = dict.fromkeys(self.group_workers, "workers")
        if self.critic is not None and self.critic.workers is not None:
            knobs["critic"] = "critic.workers"
        if self.reward_model is not None and self.reward_model.workers is not None:
            knobs["reward"] = "reward_model.workers"
        return knobs

    @property
    def group_workers(self) -> dict[Role, WorkersConfig]:
        """The processes of every group that this configuration starts, by role."""
        groups: dict[Role, WorkersConfig] = {"policy": self.workers}
        if self.critic is not None:
            groups["critic"] = self.critic_workers
        if self.algorithm.kl_coef > 0 and self.lora is None:
            groups["reference"] = self.workers
        if self.reward_model is not None:
            groups["reward"] = self.reward_model.workers or self.workers
        return groups

    @property
    def most_ranks(self) -> int:
        """Of any group."""
        return max(workers.world_size for workers in self.group_workers.values())

    @property
    def critic_workers(self) -> WorkersConfig:
        """Those of the critic group."""
        return self.critic.workers or self.workers if self.critic else self.workers

    @property
    def max_filtered_groups(self) -> int:
        """Of dynamic sampling, for one step; 0 without it."""
        return self.algorithm.max_filtered_batches * self.batch_groups if self.algorithm.dynamic_sampling else 0


class TrainConfig(TrainOptions):
    """Everything `nightshift train` needs."""

    run: Name = "default"
    fleet: Name = "fleet"
    """Whose engines generate."""
    model: ModelConfig
    redis: RedisConfig = RedisConfig()
    replay: Path | None = None
    """Train from this recording instead of the queue: no engine, no Redis; prompts and rewards are those recorded."""

    @property
    def trained_models(self) -> set[Path]:
        """Directories that policy and critic start from."""
        return {self.model.path, (self.critic and self.critic.path) or self.model.path}

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.run
