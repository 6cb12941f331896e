"""From rewards to the advantage of every trained token, for each method and with every penalty."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.types import Experience, Sample
from tests import golden_loops as golden
from tests.queue_records import a_group, a_request, a_segment
from trainer.algorithm import AlgorithmConfig
from trainer.batch import FreshGroup, Row, rows_of
from trainer.credit import assign_credit

unhurried = settings(deadline=None, max_examples=40)
SAMPLE_LOOPS = {
    "grpo": golden.grpo,
    "dr_grpo": golden.dr_grpo,
    "rloo": golden.rloo,
    "reinforce_pp": list,
    "reinforce_pp_baseline": golden.dr_grpo,
}
BETA = 0.3

tokens = st.lists(st.tuples(st.integers(0, 20).map(lambda x: x / 10), st.booleans()), min_size=1, max_size=4)
"""KL and whether the token trains."""
batches = st.lists(
    st.lists(
        st.tuples(st.integers(-20, 20).map(lambda x: x / 10), st.lists(tokens, min_size=1, max_size=2)),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=3,
)
"""Groups of samples of (reward, segments)."""


def expected_credit(groups: list, name: str, *, kl: bool, whiten: bool) -> list[float]:  # type: ignore[type-arg]
    """Of every trained token of the batch, in order, by loops."""
    by_token = name.startswith("reinforce_pp")
    found = []
    for group in groups:
        kls = [[k for segment in segments for k, trained in segment if trained] for _, segments in group]
        taken = [BETA * sum(one) if kl and not by_token else 0.0 for one in kls]
        advantages = SAMPLE_LOOPS[name]([reward - cost for (reward, _), cost in zip(group, taken, strict=True)])
        for advantage, one in zip(advantages, kls, strict=True):
            to_go = golden.reinforce_pp(advantage, one, BETA if kl and by_token else 0.0)
            found += to_go
    return golden.normalised(found) if (whiten or by_token) and found else found


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("name", SAMPLE_LOOPS)
@unhurried
@given(groups=batches)
def test_credit_is_the_methods_with_penalties_and_whitening(name: str, kl: bool, whiten: bool, groups: list) -> None:  # type: ignore[type-arg]
    samples = [(g, reward, segments) for g, group in enumerate(groups) for reward, segments in group]
    rows = [(b, segment) for b, (_, _, segments) in enumerate(samples) for segment in segments]
    masks = [torch.tensor([float(t) for _, t in segment], dtype=torch.float64) for _, segment in rows]
    found = assign_credit(
        torch.tensor([reward for _, reward, _ in samples], dtype=torch.float64),
        torch.tensor([g for g, _, _ in samples]),
        torch.ones(len(samples), dtype=torch.bool),
        samples_R=[b for b, _ in rows],
        masks_R=masks,
        penalties_R=[BETA * torch.tensor([k * t for k, t in s], dtype=torch.float64) for _, s in rows] if kl else None,
        algorithm=AlgorithmConfig.model_validate({"advantage": name, "whiten_advantages": whiten}),
    )
    flat = np.concatenate(
        [np.broadcast_to(credit, len(mask))[mask.numpy() > 0] for credit, mask in zip(found, masks, strict=True)]
    )
    assert flat.tolist() == pytest.approx(expected_credit(groups, name, kl=kl, whiten=whiten), abs=2e-5)


def test_a_method_that_needs_a_critic_is_refused_by_name() -> None:
    none = torch.zeros(0)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=gae"):
        assign_credit(
            none, none.long(), none.bool(), samples_R=[], masks_R=[], penalties_R=None,
            algorithm=AlgorithmConfig(advantage="gae"),
        )  # fmt: skip


def fresh(*rewards: float, max_tokens: int = 4) -> FreshGroup:
    request = a_request(n=len(rewards))
    request = replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))
    return FreshGroup(Experience("g", request, a_group(len(rewards), rewards=rewards)), (True,) * len(rewards))


def advantages(rows: list[Row]) -> list[float]:
    return [round(float(row.advantage), 4) for row in rows]


def test_a_response_that_comes_close_to_the_limit_loses_reward() -> None:
    # Samples have 3 and 4 tokens; of a buffer of 2 before 4 the first uses half and the second all.
    algorithm = AlgorithmConfig(advantage="dr_grpo", overlong_buffer=2, overlong_penalty=0.5)
    assert advantages(rows_of([fresh(1.0, 1.0)], same_weights={0}, algorithm=algorithm)) == [0.125, -0.125]


def test_what_a_tool_answered_does_not_make_a_response_long() -> None:
    group = fresh(1.0, 1.0)
    group.experience.group.samples_G[1].segments[0].loss_mask_T[:3] = 0
    algorithm = AlgorithmConfig(advantage="dr_grpo", overlong_buffer=2, overlong_penalty=0.5)
    # Of four tokens the second sample's policy chose one; the first sample, of three, uses half the buffer.
    assert advantages(rows_of([group], same_weights={0}, algorithm=algorithm)) == [-0.125, 0.125]


def test_a_kl_in_the_reward_is_of_the_recorded_logprobs_to_the_references() -> None:
    algorithm = AlgorithmConfig(advantage="dr_grpo", kl_in="reward", kl_estimator="k1", kl_coef=0.1)
    groups = [fresh(1.0, 1.0)]
    plain = rows_of(groups, same_weights={0}, algorithm=algorithm)
    assert advantages(plain) == [0, 0]
    reference = [plain[0].behavior_logprobs_T - 1.0, plain[1].behavior_logprobs_T]
    scored = rows_of(groups, same_weights={0}, algorithm=algorithm, reference_R=reference)
    assert advantages(scored) == [-0.15, 0.15]
    assert scored[0].reference_logprobs_T is reference[0]


def test_the_segments_of_a_sample_share_what_it_earned_and_pay_for_what_follows() -> None:
    group = a_group(2, rewards=(1.0, 0.0))
    two = Sample((a_segment(2), a_segment(1)), "two segments")
    experience = Experience("g", a_request(), replace(group, samples_G=(two, group.samples_G[1])))
    algorithm = AlgorithmConfig(advantage="reinforce_pp", kl_in="reward", kl_estimator="k1", kl_coef=1.0)
    groups = [FreshGroup(experience, (True, True))]
    plain = rows_of(groups, same_weights={0}, algorithm=algorithm)
    reference = [row.behavior_logprobs_T - 0.5 for row in plain]
    scored = rows_of(groups, same_weights={0}, algorithm=algorithm, reference_R=reference)
    raw = [1 - 1.5, 1 - 1.0, 1 - 0.5, -2.0, -1.5, -1.0, -0.5]
    found = [float(x) for row in scored for x in np.broadcast_to(row.advantage, len(row.response_ids_T))]
    assert len(scored) == 3
    assert found == pytest.approx(golden.normalised([*raw][: len(found)]), abs=1e-5)
