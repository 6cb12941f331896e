"""Training an adapter: nothing else moves, it resumes exactly, and others load what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.errors import ConfigError
from rollout.weights import read_manifest, verify_buckets
from tests.integration.test_replay import crashed, replay
from tests.integration.test_trainer_updates import planned, saved
from tests.replay_kit import replay_config, result_of, write_recording
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy
from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch
from trainer.checkpoint import CheckpointStore
from trainer.config import OptimizerConfig, TrainConfig, WorkersConfig
from trainer.engine import OPTIMIZER_FILE
from trainer.errors import CheckpointError
from trainer.lora import ADAPTER_CONFIG, ADAPTER_FILE, adapter_tensors, base_digests, check_base, write_base
from trainer.lora_config import LoraConfig
from trainer.milestone import Milestone
from trainer.policy import PolicyCore, PolicySpec
from trainer.reference import ReferenceCore

pytestmark = pytest.mark.usefixtures("single_rank")

CANARY = [(5, 6, 7, 8, 9, 10)]
LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16")]
LORA = LoraConfig(r=4, alpha=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


def core(
    model_dir: Path,
    stage: int = 0,
    dtype: str = "float32",
    *,
    lora: LoraConfig | None = LORA,
    adapter_dir: Path | None = None,
    **workers: Any,
) -> PolicyCore:
    settings = WorkersConfig.model_validate({"zero_stage": stage, "dtype": dtype, **workers})
    spec = PolicySpec(model_dir, settings, OptimizerConfig(lr=1e-2), AlgorithmConfig(), 0, lora, adapter_dir)
    return PolicyCore(spec)


def train(policy: PolicyCore, steps: int = 2, batches: list[MicroBatch] | None = None) -> list[float]:
    for _ in range(steps):
        assert policy.update(batches or planned(), lr=1e-2).applied
    return policy.canary_logprobs(CANARY)[0]


def scored(model: Any) -> list[float]:
    ids = torch.tensor(CANARY)
    with torch.no_grad():
        values = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return list(values.tolist())


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_only_the_adapter_trains_and_only_it_has_optimizer_state(model_dir: Path, tmp_path: Path, stage: int) -> None:
    policy, base = core(model_dir, stage), core(model_dir, lora=None)
    assert policy.canary_logprobs(CANARY) == base.canary_logprobs(CANARY)
    weights = {n: p.detach().clone() for n, p in policy._model.named_parameters()}
    train(policy)
    moved = {n for n, p in policy._model.named_parameters() if not torch.equal(p, weights[n])}
    adapter = {n for n in weights if ".lora_" in n}
    assert moved == adapter
    assert len(adapter) == 2 * 2 * 7  # both halves, two layers, seven linear layers each
    assert policy.canary_logprobs(CANARY)[0] != pytest.approx(base.canary_logprobs(CANARY)[0], abs=1e-2)
    policy.save_state(tmp_path)
    state = load_file(tmp_path / OPTIMIZER_FILE)
    assert {key.partition(".")[2] for key in state if key.startswith("exp_avg.")} == adapter


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_and_transformers_load_what_is_published(architecture: Architecture, tmp_path: Path) -> None:
    base = build_policy(tmp_path / "base", architecture)
    policy = core(base)
    trained = train(policy)
    version = made(tmp_path / "version")
    exported = policy.export(version, bucket_bytes=100_000)
    whole = core(base, lora=None).export(made(tmp_path / "whole"), bucket_bytes=100_000)
    assert exported.tensors == whole.tensors
    assert scored(AutoModelForCausalLM.from_pretrained(version)) == pytest.approx(trained, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert scored(PeftModel.from_pretrained(plain, version / "adapter")) == pytest.approx(trained, abs=1e-5)


def test_the_same_adapter_is_written_as_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    first, second = made(tmp_path / "first"), made(tmp_path / "second")
    for directory in (first, second):
        policy = core(model_dir)
        train(policy, 1)
        policy.save_policy(directory, bucket_bytes=1 << 28)
    assert {p.name for p in first.iterdir()} >= {ADAPTER_FILE, ADAPTER_CONFIG, "tokenizer.json"}
    assert not (first / "config.json").exists()
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    config = json.loads((first / ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, str(model_dir))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_reference_is_the_policy_with_its_adapter_off(model_dir: Path, stage: int) -> None:
    policy, undisturbed = core(model_dir, stage), core(model_dir, stage)
    reference = ReferenceCore(model_dir, WorkersConfig())
    for _ in range(2):
        train(policy, 1), train(undisturbed, 1)
        for found, wanted in zip(policy.reference_logprobs(planned()), reference.logprobs(planned()), strict=True):
            assert (found == wanted).all()
    assert train(policy, 1) == train(undisturbed, 1)
    assert (policy.logprobs(planned())[0] != policy.reference_logprobs(planned())[0]).any()


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_restored_adapter_continues_bit_for_bit(model_dir: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    policy = core(model_dir, stage, dtype)
    train(policy)
    policy.save_policy(tmp_path, bucket_bytes=1 << 28)
    policy.save_state(tmp_path)
    restored = core(model_dir, stage, dtype, adapter_dir=tmp_path)
    restored.load_state(tmp_path)
    assert train(restored) == train(policy)


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_an_update_that_is_not_finite_undoes_those_before_it(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    policy = core(model_dir, stage, dtype)
    train(policy, 1)
    before = saved(policy, tmp_path / "before")
    poisoned = planned(minibatches=3)
    poisoned[-1].advantages_BW[0] = float("inf")
    assert not policy.update(poisoned, lr=1e-2).applied
    after = saved(policy, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("workers", [{"gradient_checkpointing": True}, {"packing": "off"}])
def test_settings_of_the_workers_change_nothing(model_dir: Path, workers: dict[str, Any]) -> None:
    assert train(core(model_dir, **workers)) == pytest.approx(train(core(model_dir)), abs=1e-5)


def test_chosen_layers_alone_are_adapted(model_dir: Path) -> None:
    policy = core(model_dir, lora=LoraConfig(r=2, target_modules=("q_proj", "v_proj")))
    names = adapter_tensors(policy._model)
    assert len(names) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in names)
    with pytest.raises(
        ConfigError, match=r"lora.target_modules names x_proj, but the linear layers of .* are .*v_proj"
    ):
        core(model_dir, lora=LoraConfig(target_modules=("q_proj", "x_proj")))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(r=8, alpha=8), "r=4, but train.lora.r=8"),
        (LoraConfig(r=4, alpha=16), r"alpha=8.0, but train.lora.alpha=16.0"),
        (LoraConfig(r=4, alpha=8, target_modules=("q_proj",)), "tensors differ"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    model_dir: Path, tmp_path: Path, lora: LoraConfig, message: str
) -> None:
    core(model_dir).save_policy(tmp_path, bucket_bytes=1 << 28)
    with pytest.raises(CheckpointError, match=message):
        core(model_dir, lora=lora, adapter_dir=tmp_path)


CHANGES = {"lora": {"r": 4, "alpha": 8, "publish": "merged"}, "algorithm": {"kl_coef": 0.1}, "optimizer": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("recording") / "source.rec")


@pytest.fixture(scope="module")
async def twin(
    single_rank: None, tmp_path_factory: pytest.TempPathFactory, model_dir: Path, recording: Path
) -> TrainConfig:
    """A run that nothing interrupted."""
    config = replay_config(tmp_path_factory.mktemp("twin"), model_dir, "twin", recording, **CHANGES)
    await replay(config)
    return config


@pytest.mark.parametrize("at", list(Milestone))
async def test_a_replay_that_crashed_at_any_milestone_ends_as_its_twin(
    tmp_path: Path, twin: TrainConfig, at: Milestone, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = twin.model_copy(update={"run": "killed", "runs_dir": tmp_path})
    await crashed(config, at, 2, monkeypatch)
    await replay(config)
    assert result_of(config) == result_of(twin)


def test_a_checkpoint_holds_the_adapter_and_a_version_both(twin: TrainConfig, model_dir: Path) -> None:
    newest = CheckpointStore(twin.run_dir / "checkpoints", keep=2).newest()
    assert newest is not None
    weights = {path.name for path in newest.directory.rglob("*.safetensors") if not path.name.startswith("rng")}
    assert weights == {ADAPTER_FILE, OPTIMIZER_FILE}
    version = max((twin.run_dir / "weights").glob("v*"))
    manifest = read_manifest(version)
    verify_buckets(version, manifest)
    whole = AutoModelForCausalLM.from_pretrained(version)
    adapter = load_file(newest.policy_dir / ADAPTER_FILE)
    published = load_file(version / "adapter" / ADAPTER_FILE)
    assert adapter.keys() == published.keys()
    assert all(torch.equal(adapter[name], published[name]) for name in adapter)
    resolved = AutoModelForCausalLM.from_pretrained(newest.policy_dir)
    assert scored(resolved) == pytest.approx(scored(whole), abs=1e-5)
    assert scored(resolved) != pytest.approx(scored(AutoModelForCausalLM.from_pretrained(model_dir)), abs=1e-3)
    assert len(AutoTokenizer.from_pretrained(newest.policy_dir)) == whole.config.vocab_size


async def test_a_version_can_be_the_adapter_alone(tmp_path: Path, model_dir: Path, recording: Path) -> None:
    changes = {**CHANGES, "lora": {"r": 4, "publish": "adapter"}}
    config = replay_config(tmp_path, model_dir, "run", recording, steps=1, **changes)
    await replay(config)
    version = max((config.run_dir / "weights").glob("v*"))
    manifest = read_manifest(version)
    verify_buckets(version, manifest)
    assert [bucket.file for bucket in manifest.buckets] == [ADAPTER_FILE]
    assert manifest.form == "adapter"
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.target_modules) == (4, LINEAR)
    assert set(load_file(version / ADAPTER_FILE)) == {tensor.name for tensor in manifest.tensors}
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), version)
    ids, expected = manifest.canary.token_ids[0], manifest.canary.logprobs[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    assert found == pytest.approx(list(expected), abs=1e-5)


async def test_a_run_keeps_to_an_adapter_or_to_whole_weights(tmp_path: Path, model_dir: Path, recording: Path) -> None:
    adapter = replay_config(tmp_path, model_dir, "run", recording, steps=1, **CHANGES)
    await replay(adapter)
    with pytest.raises(CheckpointError, match=r"holds an adapter, but train.lora is not set"):
        await replay(adapter.model_copy(update={"lora": None, "steps": 2}))


def test_an_adapter_goes_on_only_with_the_weights_that_it_was_trained_on(tmp_path: Path, model_dir: Path) -> None:
    policy_dir, other = made(tmp_path / "policy"), build_policy(tmp_path / "other", "qwen3_tied", seed=7)
    write_base(policy_dir, base_digests(model_dir))
    check_base(policy_dir, model_dir, base_digests(model_dir))
    with pytest.raises(CheckpointError, match=f"adapter of other weights than those now in model.path={other}"):
        check_base(policy_dir, other, base_digests(other))
