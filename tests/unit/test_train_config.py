"""Settings that cannot work are refused at parse, with both values and the knob."""

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import TrainConfig

BASE: dict[str, Any] = {
    "model": {"path": "/models/m"},
    "prompts": {"train": "train.jsonl"},
    "reward": {"name": "exact_match"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"n": 1}, "staleness": {"min_group_samples": 1}}, "grpo compares samples"),
        ({"sampling": {"top_p": 0.9}}, r"top_p=0.9, top_k=0: training needs top_p=1"),
        ({"sampling": {"top_k": 5}}, r"top_k=5: training needs"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature.*\n.*greater than or equal to 0.01"),
        ({"sampling": {"temperature": 0.005}}, "greater than or equal to 0.01"),
        ({"sampling": {"temperature": 2.5}}, "less than or equal to 2"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"betas\.1\n  Input should be less than 1"),
        ({"optimizer": {"betas": [-0.1, 0.9]}}, r"betas\.0\n  Input should be greater than or equal to 0"),
        ({"optimizer": {"lr": float("inf")}}, "finite number"),
        ({"stall_s": float("nan")}, "finite number"),
        ({"staleness": {"min_group_samples": 9}}, r"min_group_samples=9 is above sampling.n=8"),
        ({"workers": {"dtype": "bfloat16"}}, "needs zero_stage=1, 2 or 3"),
        ({"workers": {"zero_stage": 4}}, "less than or equal to 3"),
        ({"workers": {"offload_optimizer": True}}, "needs zero_stage=1, 2 or 3"),
        ({"push": {"backend": "nccl"}}, r"needs workers.device=cuda"),
        ({"push": {"op_timeout_s": 20}}, "must be above op_timeout_s=20"),
        ({"push": {"invite_s": 15}}, r"invite_s=15.0 must be below form_timeout_s=15.0"),
        ({"algorithm": {"clip_low": 1.0}}, "less than 1"),
        ({"algorithm": {"kl_estimator": "k1", "kl_coef": 0.1}}, "its gradient's expectation is 0: use k2 or k3"),
        ({"algorithm": {"kl_estimator": "k1", "kl_coef": 0.1}}, "kl_estimator=k1 does nothing with kl_in=loss"),
        (
            {"critic": {"workers": {"dtype": "bfloat16"}}, "algorithm": {"advantage": "gae"}},
            r"critic\.workers\n.*dtype=bfloat16 needs zero_stage=1, 2 or 3",
        ),
        ({"algorithm": {"advantage": "ppo"}}, r"algorithm.advantage\n  Input should be 'grpo', 'dr_grpo', 'rloo'"),
        ({"algorithm": {"loss": "ppo"}}, "Input should be 'ppo_clip', 'gspo' or 'cispo'"),
        ({"algorithm": {"correction": "is"}}, "Input should be 'none', 'tis', 'tis_sequence', 'icepop'"),
        ({"algorithm": {"advantage": "gae"}}, r"algorithm.advantage=gae needs .* critic"),
        ({"critic": {}}, r"\[train.critic\] gives values that algorithm.advantage=grpo does not use"),
        (
            {"critic": {"warmup_steps": 5}, "steps": 5, "algorithm": {"advantage": "gae"}},
            "critic.warmup_steps=5 leaves none of steps=5",
        ),
        ({"critic": {"value_clip": 0}, "algorithm": {"advantage": "gae"}}, "greater than 0"),
        (
            {"critic": {"workers": {"packing": "on"}}, "algorithm": {"advantage": "gae"}},
            "critic.workers.packing=on, but the rows of a critic are padded",
        ),
        ({"reward_model": {"path": "m", "weight": 0}}, "reward_model.weight=0 leaves m out of the reward"),
        (
            {"reward_model": {"path": "/models/rm"}, "algorithm": {"dynamic_sampling": True}},
            "dynamic_sampling=true filters groups .* before reward_model=/models/rm scores them",
        ),
        ({"reward_model": {"path": "/models/rm", "weight": float("nan")}}, "finite number"),
        ({"algorithm": {"gae_lambda": 1.1}}, "less than or equal to 1"),
        ({"algorithm": {"loss": "gspo"}}, "loss=gspo .* aggregation=token_mean: use sequence_mean"),
        (
            {"algorithm": {"loss": "gspo", "aggregation": "sequence_mean"}},
            "loss=gspo .* correction=tis weighs every token .*: use tis_sequence, behavior or none",
        ),
        ({"algorithm": {"loss": "cispo", "dual_clip": 3.0}}, "dual_clip=3.0 .* loss=cispo"),
        ({"algorithm": {"dual_clip": 1.0}}, "greater than 1"),
        (
            {"algorithm": {"advantage": "reinforce_pp", "dynamic_sampling": True}},
            "dynamic_sampling=true .* advantage=reinforce_pp",
        ),
        (
            {"algorithm": {"minibatches": 65}, "batch_groups": 8},
            r"minibatches=65 is above .* batch_groups=8 x sampling.n=8",
        ),
        (
            {"algorithm": {"overlong_buffer": 9}, "sampling": {"max_tokens": 8}},
            r"overlong_buffer=9 is above sampling.max_tokens=8",
        ),
        (
            {
                "algorithm": {"advantage": "reinforce_pp"},
                "batch_groups": 1,
                "sampling": {"n": 1},
                "staleness": {"min_group_samples": 1},
            },
            r"advantage=reinforce_pp .* batch_groups=1 x sampling.n=1",
        ),
        ({"evaluation": {"every": 5}}, r"evaluation.every=5 .* prompts.eval"),
        ({"algorithm": {"kl_in": "reward"}}, r"kl_in=reward .* kl_coef=0"),
        ({"staleness": {"min_group_samples": 1}}, r"min_group_samples=1 .* algorithm.advantage=grpo"),
        ({"prompts": {"train": "p.jsonl", "shuffle_seed": -1}}, "greater than or equal to 0"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"stepz": 3}, "Extra inputs are not permitted"),
        ({"run": "Not A Name"}, "String should match"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({**BASE, **change})


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_method_that_compares_samples_needs_two_of_them(advantage: str) -> None:
    one = {"sampling": {"n": 1}, "staleness": {"min_group_samples": 1}}
    with pytest.raises(ValidationError, match=rf"algorithm.advantage={advantage} compares samples .* sampling.n=1"):
        TrainConfig.model_validate({**BASE, **one, "algorithm": {"advantage": advantage}})
    assert TrainConfig.model_validate({**BASE, **one, "algorithm": {"advantage": "reinforce_pp"}}).sampling.n == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "gspo", "aggregation": "sequence_mean", "correction": "tis_sequence", "clip_low": 3e-4},
        {"loss": "cispo", "correction": "behavior", "advantage": "rloo"},
        {"kl_estimator": "k1", "kl_in": "reward", "kl_coef": 0.01, "advantage": "reinforce_pp"},
        {"dynamic_sampling": True, "clip_high": 0.28, "overlong_buffer": 16, "dual_clip": 10.0},
        {"kl_estimator": "k1"},
        {"correction": "decoupled", "ppo_epochs": 2, "minibatches": 4, "sequence_mask": "geometric"},
    ],
)
def test_a_combination_that_makes_sense_is_accepted(algorithm: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({**BASE, "algorithm": algorithm})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "change",
    [
        {"batch_groups": 2},
        {"batch_groups": 1, "algorithm": {"advantage": "reinforce_pp", "kl_in": "reward", "kl_coef": 0.1}},
        {"batch_groups": 1, "algorithm": {"advantage": "gae", "whiten_advantages": True}, "critic": {}},
    ],
)
def test_one_sample_a_prompt_is_accepted_where_its_tokens_can_differ(change: dict[str, Any]) -> None:
    one = {"sampling": {"n": 1}, "staleness": {"min_group_samples": 1}, "algorithm": {"advantage": "reinforce_pp"}}
    assert TrainConfig.model_validate({**BASE, **one, **change}).sampling.n == 1


@pytest.mark.parametrize("unused", [{"dtype": "bfloat16"}, {"offload_optimizer": True}])
def test_workers_of_a_frozen_model_need_no_master_weights(unused: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({**BASE, "reward_model": {"path": "/models/rm", "workers": unused}})
    assert config.group_workers["reward"].zero_stage == 0


def test_a_critic_makes_gae_possible_and_runs_as_the_policy_does_unless_told_otherwise() -> None:
    ppo = {**BASE, "algorithm": {"advantage": "gae"}, "workers": {"world_size": 2, "zero_stage": 2}}
    shared = TrainConfig.model_validate({**ppo, "critic": {}})
    assert shared.critic_workers == shared.workers
    own = TrainConfig.model_validate({**ppo, "critic": {"workers": {"zero_stage": 1}}})
    assert (own.critic_workers.world_size, own.critic_workers.zero_stage) == (1, 1)
    assert {role: group.world_size for role, group in own.group_workers.items()} == {"policy": 2, "critic": 1}
    assert TrainConfig.model_validate_json(own.model_dump_json()) == own


def test_the_defaults_are_consistent_and_survive_json() -> None:
    config = TrainConfig.model_validate(BASE)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
