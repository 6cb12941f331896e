"""A critic's values are its classifier's before each token; policy and critic are updated both or neither."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from rollout.config import RedisConfig
from rollout.errors import ConfigError
from rollout.types import Experience, Sample
from tests.critic_kit import STAGES, Rank, a_critic, a_policy, equal, saved, valued_rows
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request, a_segment
from tests.tiny_models import ARCHITECTURES, Architecture, build_classifier, build_policy, build_tokenizer
from tests.trainer_kit import ROUNDING, train_config
from trainer.batch import FreshGroup, MicroBatch, Row, by_row, make_batch
from trainer.commit import Job, all_or_none
from trainer.config import CriticConfig, TrainConfig
from trainer.critic import CriticCore
from trainer.errors import ModelError
from trainer.models import check_same_tokens
from trainer.step import Update, update
from trainer.workers import Workers

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


def share(rows: list[Row], budget: int = 64) -> list[MicroBatch]:
    return make_batch(rows, world_size=1, max_tokens=budget, aggregation="token_mean")[0]


def values_of(critic: CriticCore, rows: list[Row]) -> list[Any]:
    return by_row(rows, [share(rows)], [critic.values(share(rows))])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_value_before_a_token_is_the_classifiers_score_of_what_precedes_it(
    architecture: Architecture, tmp_path: Path
) -> None:
    directory = build_classifier(tmp_path / "classifier", architecture)
    rows = valued_rows(5)
    found = values_of(a_critic(directory), rows)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    for row, values_T in zip(rows, found, strict=True):
        ids = np.concatenate([row.prompt_ids_P, row.response_ids_T])
        for t, value in enumerate(values_T):
            with torch.no_grad():
                score = model(torch.tensor(ids[None, : len(row.prompt_ids_P) + t])).logits
            assert float(value) == pytest.approx(float(score), abs=ROUNDING)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_language_model_becomes_a_critic_whose_values_start_at_zero_and_then_fit(
    architecture: Architecture, tmp_path: Path
) -> None:
    critic, rows = a_critic(build_policy(tmp_path / "policy", architecture), value_clip=None), valued_rows()
    assert not any(values.any() for values in values_of(critic, rows))
    losses = [critic.update(share(rows), lr=3e-3).sums["loss"] for _ in range(25)]
    assert losses[-1] < losses[0] / 10
    expected = [float(row.returns_T[-1]) for row in rows if row.returns_T is not None]
    assert np.corrcoef([values[-1] for values in values_of(critic, rows)], expected)[0, 1] > 0.9


def test_zero_stages_take_the_same_steps(model_dir: Path) -> None:
    found = []
    for stage in (0, 1, 2, 3):
        critic = a_critic(model_dir, stage)
        for _ in range(3):
            assert critic.update(share(valued_rows()), lr=1e-3).applied
        found.append(np.concatenate(values_of(critic, valued_rows())))
    assert np.abs(found[0]).max() > 1e-3
    assert found[1] == pytest.approx(found[0], abs=ROUNDING)
    assert found[2] == pytest.approx(found[0], abs=ROUNDING)


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_restored_critic_continues_bit_for_bit_and_loads_as_a_classifier(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    critic, rows = a_critic(model_dir, stage, dtype), valued_rows()
    for _ in range(2):
        critic.update(share(rows), lr=1e-3)
    saved(critic, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    restored = a_critic(tmp_path, stage, dtype)
    restored.load_state(tmp_path)
    for one in (critic, restored):
        assert one.update(share(rows), lr=1e-3).applied
    assert np.array_equal(np.concatenate(values_of(critic, rows)), np.concatenate(values_of(restored, rows)))


def test_gradient_checkpointing_changes_no_value(model_dir: Path) -> None:
    plain, checkpointed = a_critic(model_dir), a_critic(model_dir)
    checkpointed._model.classifier.gradient_checkpointing_enable()
    checkpointed._model.train()
    for one in (plain, checkpointed):
        one.update(share(valued_rows()), lr=1e-3)
    expected = np.concatenate(values_of(plain, valued_rows()))
    assert np.concatenate(values_of(checkpointed, valued_rows())) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_held_update_is_undone_without_a_trace(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str, steps_before: int
) -> None:
    critic, twin = a_critic(model_dir, stage, dtype), a_critic(model_dir, stage, dtype)
    for _ in range(steps_before):
        for one in (critic, twin):
            one.update(share(valued_rows()), lr=1e-3)
    before = saved(critic, tmp_path / "before")
    assert critic.update(share(valued_rows(seed=8)), lr=1e-2, hold=True).applied
    assert not equal(before, saved(critic, tmp_path / "between"))
    critic.release(undo=True)
    assert equal(before, saved(critic, tmp_path / "after"))
    for one in (critic, twin):
        one.update(share(valued_rows()), lr=1e-3)
    assert equal(saved(twin, tmp_path / "twin"), saved(critic, tmp_path / "end"))


def test_what_is_not_held_cannot_be_undone(model_dir: Path) -> None:
    critic = a_critic(model_dir)
    critic.update(share(valued_rows()), lr=1e-3)
    with pytest.raises(RuntimeError, match="no update is held"):
        critic.release(undo=True)
    critic.update(share(valued_rows()), lr=1e-3, hold=True)
    critic.release(undo=False)
    with pytest.raises(RuntimeError, match="no update is held"):
        critic.release(undo=True)


@pytest.mark.parametrize("culprit", ["policy", "critic", "both", "none"])
@pytest.mark.parametrize("stage", [0, 2, 3])
async def test_policy_and_critic_are_updated_both_or_neither(
    model_dir: Path, tmp_path: Path, stage: int, culprit: str
) -> None:
    groups = {"policy": Rank(a_policy(model_dir, stage)), "critic": Rank(a_critic(model_dir, stage))}
    before = {name: saved(group.core, tmp_path / f"{name}-before") for name, group in groups.items()}
    jobs = []
    for name, group in groups.items():
        batches = share(valued_rows())
        if culprit in (name, "both"):
            bad = batches[-1].advantages_BW if name == "policy" else batches[-1].returns_BW
            assert bad is not None
            bad[0] = np.inf
        jobs.append(Job(group, [batches], 1e-3))  # type: ignore[arg-type]
    results = await all_or_none(jobs)
    fine = culprit == "none"
    assert [result.applied for result in results] == [culprit in ("critic", "none"), culprit in ("policy", "none")]
    for name, group in groups.items():
        assert equal(before[name], saved(group.core, tmp_path / f"{name}-after")) is not fine
        assert group.core._trained._held is None
        assert group.calls == ["update", "release"] if culprit not in (name, "both") else group.calls == ["update"]


def groups(policy: Any, *, bad: float | None = None) -> list[FreshGroup]:
    """Two groups of four; the samples of one answer well with some tokens, and one sample of each is too old."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(2):
        samples, rewards = [], []
        for length in (3, 4, 5, 6):
            ids = rng.integers(5, 200, length).astype(np.int32)
            samples.append(Sample((replace(a_segment(length), response_ids_T=ids),), ""))
            rewards.append(float(ids[0] > 100) if bad is None else bad)
        group = replace(a_group(4, rewards=tuple(rewards)), samples_G=tuple(samples))
        made.append(FreshGroup(Experience(f"g{number}", a_request(n=4), group), (True, True, False, True)))
    return made


def ppo(tmp_path: Path, model_dir: Path, **changes: Any) -> TrainConfig:
    values = {
        "algorithm": {"advantage": "gae", "whiten_advantages": True},
        "critic": {"optimizer": {"lr": 3e-3}},
        **changes,
    }
    return train_config(tmp_path, RedisConfig(), "run", model_dir, **values)


async def stepped(
    config: TrainConfig, policy: Rank, critic: Rank, *, step: int = 1, bad: float | None = None
) -> Update:
    return await update(
        groups(policy.core, bad=bad), step=step, seed=0, same_weights={0}, config=config,
        workers=Workers(policy, critic=critic),  # type: ignore[arg-type]
    )  # fmt: skip


async def test_a_step_takes_values_first_then_updates_both_and_tells_how_well_they_fit(
    model_dir: Path, tmp_path: Path
) -> None:
    config = ppo(tmp_path, model_dir)
    policy, critic = Rank(a_policy(model_dir, advantage="gae")), Rank(a_critic(model_dir, optimizer={"lr": 3e-3}))
    found = [await stepped(config, policy, critic, step=step) for step in range(1, 31)]
    assert all(one.applied for one in found)
    assert policy.calls[:2] == ["update", "release"]
    assert critic.calls[:3] == ["values", "update", "release"]
    assert found[0].metrics["trained_tokens"] == 2 * (3 + 4 + 6)
    assert found[0].metrics["value_mean"] == 0
    assert {"loss", "grad_norm", "value_loss", "critic_grad_norm", "critic_lr", "return_mean"} <= set(found[0].metrics)
    assert found[0].metrics["explained_variance"] < 0.1
    assert found[-1].metrics["explained_variance"] > 0.7


async def test_several_epochs_measure_value_and_ratio_from_the_start_of_the_step(
    model_dir: Path, tmp_path: Path
) -> None:
    algorithm = {"advantage": "gae", "ppo_epochs": 2, "minibatches": 2}
    config = ppo(tmp_path, model_dir, algorithm=algorithm, critic={"epochs": 5, "optimizer": {"lr": 1e-2}})
    policy, critic = Rank(a_policy(model_dir, **algorithm)), Rank(a_critic(model_dir))
    result = await stepped(config, policy, critic)
    assert result.applied
    assert result.metrics["updates"] == 4
    assert result.metrics["value_clip_fraction"] > 0
    assert sorted(policy.calls) == ["logprobs", "release", "update"]


@pytest.mark.fault("a reward that is not finite in the batch of policy and critic", "P9")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
async def test_a_reward_that_is_not_finite_moves_neither(
    model_dir: Path, tmp_path: Path, bad: float, fault: FaultRow
) -> None:
    policy, critic = Rank(a_policy(model_dir, advantage="gae")), Rank(a_critic(model_dir))
    before = saved(policy.core, tmp_path / "policy"), saved(critic.core, tmp_path / "critic")
    result = await stepped(ppo(tmp_path, model_dir), policy, critic, bad=bad)
    assert not result.applied
    fault.fired = True
    assert equal(before[0], saved(policy.core, tmp_path / "policy"))
    assert equal(before[1], saved(critic.core, tmp_path / "critic"))


async def test_the_critics_warm_up_leaves_the_policy_as_it_is(model_dir: Path, tmp_path: Path) -> None:
    config = ppo(tmp_path, model_dir, critic={"warmup_steps": 1, "optimizer": {"lr": 1e-3}})
    policy, critic = Rank(a_policy(model_dir, advantage="gae")), Rank(a_critic(model_dir))
    before = saved(policy.core, tmp_path / "before")
    first = await stepped(config, policy, critic, step=1)
    assert (first.applied, policy.calls, critic.calls) == (True, [], ["values", "update"])
    assert "loss" not in first.metrics
    assert equal(before, saved(policy.core, tmp_path / "first"))
    second = await stepped(config, policy, critic, step=2)
    assert second.metrics["value_mean"] != 0
    assert not equal(before, saved(policy.core, tmp_path / "second"))


def test_a_model_that_looks_ahead_is_no_critic(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    shape: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_labels": 1}
    attention = {"num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForSequenceClassification(BertConfig(**shape, **attention))
    gemma = Gemma3TextForSequenceClassification(
        Gemma3TextConfig(**shape, **attention, num_key_value_heads=1, head_dim=16, use_bidirectional_attention=True)
    )
    for model, message in ((bert, "has no linear head named score"), (gemma, "looks at later tokens")):
        directory = tmp_path / type(model).__name__
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        with pytest.raises(ModelError, match=message):
            a_critic(directory)


def test_a_learned_position_embedding_makes_a_critic_too(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    critic = a_critic(tmp_path)
    assert critic.update(share(valued_rows()), lr=1e-3).applied


def test_a_critic_of_other_tokens_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    check_same_tokens(model_dir, other, knob="train.critic.path")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"train.critic.path=.*1 entries of their vocabularies differ"):
        check_same_tokens(model_dir, other, knob="train.critic.path")
    assert CriticConfig(path=other).path == other
