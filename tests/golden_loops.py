"""Advantages, losses, corrections and aggregations as slow float64 loops.

Written from the papers and independent of the trainer: plain lists, no tensors, a response at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Floats = list[float]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# Advantages, one group at a time.


def grpo(rewards: Floats) -> Floats:
    """arXiv 2402.03300: (r - mean) / std."""
    deviation = math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards]))
    return [(r - mean(rewards)) / (deviation + 1e-6) if deviation > 1e-6 else 0.0 for r in rewards]


def dr_grpo(rewards: Floats) -> Floats:
    """arXiv 2503.20783: r - mean."""
    return [r - mean(rewards) for r in rewards]


def rloo(rewards: Floats) -> Floats:
    """arXiv 2402.14740: r minus the mean of the others."""
    if len(rewards) == 1:
        return [0.0]
    return [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def reinforce_pp(reward: float, kl: Floats, beta: float) -> Floats:
    """arXiv 2501.03262: the reward minus beta times the KL from the token on."""
    return [reward - beta * sum(kl[t:]) for t in range(len(kl))]


def normalised(values: Floats) -> Floats:
    """Over a whole batch: (a - mean) / std."""
    deviation = math.sqrt(max(mean([(v - mean(values)) ** 2 for v in values]), 1e-8))
    return [(v - mean(values)) / deviation for v in values]


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """arXiv 1506.02438, eq. 16, as the sum it is: sum over l of (gamma lambda)^l delta_{t+l}."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


# Losses: one response, its trained tokens only.


@dataclass(frozen=True)
class Response:
    """Logprobs and advantages of the trained tokens of one response."""

    policy: Floats
    proximal: Floats
    behavior: Floats
    advantages: Floats
    now: Floats | None = None
    """The policy where its gradient is taken, for what the gradient does not flow through."""

    def moved(self, t: int, by: float) -> "Response":
        policy = [p + by * (i == t) for i, p in enumerate(self.policy)]
        return replace(self, policy=policy, now=self.policy if self.now is None else self.now)


@dataclass(frozen=True)
class Knobs:
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    cap: float = 2.0
    ice_low: float = 0.5
    ice_high: float = 5.0
    keep_low: float = 0.5
    keep_high: float = 2.0


def ppo(response: Response, old: Floats, knobs: Knobs) -> Floats:
    """arXiv 1707.06347, eq. 7; arXiv 1912.09729 for the dual clip."""
    losses = []
    for new, before, advantage in zip(response.policy, old, response.advantages, strict=True):
        ratio = math.exp(new - before)
        objective = min(ratio * advantage, clip(ratio, 1 - knobs.low, 1 + knobs.high) * advantage)
        if knobs.dual is not None and advantage < 0:
            objective = max(objective, knobs.dual * advantage)
        losses.append(-objective)
    return losses


def gspo(response: Response, old: Floats, knobs: Knobs) -> Floats:
    """arXiv 2507.18071: one ratio and one loss a response (which has one advantage)."""
    gaps = [new - before for new, before in zip(response.policy, old, strict=True)]
    ratio, advantage = math.exp(mean(gaps)), response.advantages[0]
    loss = -min(ratio * advantage, clip(ratio, 1 - knobs.low, 1 + knobs.high) * advantage)
    return [loss] * len(gaps)


def cispo(response: Response, old: Floats, knobs: Knobs) -> Floats:
    """arXiv 2506.13585, without a lower bound."""
    now = response.policy if response.now is None else response.now
    return [
        -min(math.exp(fixed - before), 1 + knobs.high) * advantage * new
        for new, fixed, before, advantage in zip(response.policy, now, old, response.advantages, strict=True)
    ]


LOSSES: dict[str, Callable[[Response, Floats, Knobs], Floats]] = {"ppo_clip": ppo, "gspo": gspo, "cispo": cispo}


def weights(response: Response, correction: str, sequence_mask: str, knobs: Knobs) -> Floats:
    """What a correction multiplies the loss of each token by."""
    gaps = [p - b for p, b in zip(response.proximal, response.behavior, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    found = {
        "none": [1.0] * len(gaps),
        "behavior": [1.0] * len(gaps),
        "tis": [min(r, knobs.cap) for r in ratios],
        "tis_sequence": [min(math.prod(ratios), knobs.cap)] * len(gaps),
        "icepop": [r if knobs.ice_low <= r <= knobs.ice_high else 0.0 for r in ratios],
        "decoupled": ratios,
    }[correction]
    judged = {"none": 1.0, "product": math.prod(ratios), "geometric": math.exp(mean(gaps))}[sequence_mask]
    return found if sequence_mask == "none" or knobs.keep_low <= judged <= knobs.keep_high else [0.0] * len(gaps)


def aggregated(losses: Sequence[Floats], aggregation: str, fixed_length: int) -> float:
    """Of a batch, whose responses each have a trained token."""
    if aggregation == "token_mean":
        return mean([loss for row in losses for loss in row])
    if aggregation == "sequence_mean":
        return mean([mean(row) for row in losses])
    return mean([sum(row) / fixed_length for row in losses])


def objective(
    responses: Sequence[Response],
    *,
    loss: str,
    correction: str,
    sequence_mask: str,
    aggregation: str,
    fixed_length: int,
    knobs: Knobs,
) -> float:
    """The loss of a batch."""
    rows = []
    for response in responses:
        old = response.behavior if correction == "behavior" else response.proximal
        factors = weights(response, correction, sequence_mask, knobs)
        rows.append([w * x for w, x in zip(factors, LOSSES[loss](response, old, knobs), strict=True)])
    return aggregated(rows, aggregation, fixed_length)


def k_estimate(policy: float, reference: float, estimator: str) -> float:
    """Schulman 2020, with r = reference / policy: -log r, (log r)^2 / 2, (r - 1) - log r."""
    ratio = math.exp(reference - policy)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def value(new: float, old: float, target: float, bound: float | None) -> float:
    """PPO's published code: half the larger of the squared errors of the value and of the clipped value."""
    if bound is None:
        return (new - target) ** 2 / 2
    return max((new - target) ** 2, (clip(new, old - bound, old + bound) - target) ** 2) / 2


def overlong(length: int, max_tokens: int, buffer: int) -> float:
    """arXiv 2503.14476, eq. 13."""
    if length <= max_tokens - buffer:
        return 0.0
    if length <= max_tokens:
        return ((max_tokens - buffer) - length) / buffer
    return -1.0


# Of logits, and derivatives.


def log_softmax(logits: Floats) -> Floats:
    top = max(logits)
    total = top + math.log(sum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def entropy(logits: Floats) -> float:
    return -sum(math.exp(x) * x for x in log_softmax(logits))


def slope(function: Callable[[float], float], step: float = 1e-6) -> float:
    """Central difference at 0."""
    return (function(step) - function(-step)) / (2 * step)
