"""The demo's reward model: a sequence classifier of one label, trained on the spot to tell right answers, then cached.

It starts from the policy's weights and learns from right answers and from wrong ones that are made up
(`deploy.demo.mistakes`). Its score at the end token is to be 1 for a right answer and 0 for a wrong one, and at every
letter before it says the same of that letter, because one verdict an answer teaches too slowly. The loss is the squared
error, least when the score is the chance of being right (Brier, 1950), so that it weighs like the verifier's reward.
The gate looks at what it will be asked about instead: answers of the policy itself to questions that neither has learnt
from.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deploy.demo.cache import cached
from deploy.demo.mistakes import garbled, mistaken
from deploy.demo.models import TRAINING_FILE
from deploy.demo.policy import Progress, descend
from deploy.demo.score import respond, verified
from deploy.demo.task import GATE_SEED, GATE_SIZE, WARMUP_SEED, Entry, entries, held_out, prompt_of, questions
from rollout.errors import NightshiftError

log = structlog.get_logger(__name__)

_IGNORED = -1.0
Answered = tuple[list[int], float]
"""Token ids of a prompt and a response, and 1 where the response is right, else 0."""


@dataclass(frozen=True, slots=True)
class RewardTraining:
    """Everything that decides the bytes of the reward model, beside the policy it starts from."""

    steps: int = 300
    batch: int = 128
    lr: float = 1e-3
    lr_warmup: int = 20
    right: float = 0.3
    """Share of right answers."""
    garbled: float = 0.35
    """Share of answers that are wrong about half of the way, which show most letters; the others have one mistake."""
    words: int = 30_000
    seed: int = 0
    auc_min: float = 0.97
    """Gate: how often a right answer of the policy has to score above a wrong one."""
    gap_min: float = 0.5
    """Gate: how far apart the mean scores of both have to be; 1 is the distance between the verifier's rewards."""
    samples: int = 4
    """Answers a question of the gate."""
    extension: int = 100
    """Steps added when the gate says too little was learnt."""
    extensions: int = 3


@dataclass(frozen=True, slots=True)
class Discrimination:
    """How well scores tell right answers from wrong ones."""

    auc: float
    """The chance that a right answer scores above a wrong one, a tie counting half."""
    right_mean: float
    wrong_mean: float
    right: int
    """Answers."""
    wrong: int


class RewardModelError(NightshiftError, RuntimeError):
    """The reward model is not fit for the demo; the message holds its figures and the gate."""


def cached_reward_model(
    cache_dir: Path, policy: Path, training: RewardTraining = RewardTraining(), *, progress: Progress | None = None
) -> Path:
    """The directory of the reward model for a cached policy, trained when it is not there. Raises RewardModelError."""
    text = json.dumps([policy.name, asdict(training)], sort_keys=True)
    shown = progress or (lambda _done, _total, _what: None)
    return cached(
        cache_dir / f"demo-reward-model-{hashlib.sha256(text.encode()).hexdigest()[:12]}",
        lambda directory: build_reward_model(directory, policy, training, progress=shown),
        marker=TRAINING_FILE,
    )


def build_reward_model(
    directory: Path, policy: Path, training: RewardTraining, *, progress: Progress
) -> Discrimination:
    """Train it and write it with the policy's tokenizer and `reward-model.json`; returns what the gate saw."""
    torch.manual_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    model = cast(
        PreTrainedModel,
        AutoModelForSequenceClassification.from_pretrained(
            policy, num_labels=1, dtype=torch.float32, trust_remote_code=False
        ),
    )
    reserved = questions(held_out())
    gate = entries(GATE_SEED, GATE_SIZE, exclude=reserved)
    words = entries(WARMUP_SEED, training.words, exclude=reserved | questions(gate))
    asked = _answers(policy, tokenizer, gate, training)
    result = _train(model, tokenizer, words, asked, training, progress=progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / TRAINING_FILE).write_text(json.dumps({"training": asdict(training), "gate": asdict(result)}, indent=2))
    return result


def gate_opens(result: Discrimination, training: RewardTraining) -> bool:
    """Right answers score above wrong ones nearly always, and far enough to count beside the verifier's reward."""
    return result.auc >= training.auc_min and result.right_mean - result.wrong_mean >= training.gap_min


def discrimination(scores: Sequence[float], labels: Sequence[float]) -> Discrimination:
    """Of scores by labels 1 and 0, of which both occur. The AUC is the Mann-Whitney statistic over all pairs."""
    scores_N, labels_N = np.asarray(scores), np.asarray(labels)
    right_R, wrong_W = scores_N[labels_N == 1], scores_N[labels_N == 0]
    difference_RW = right_R[:, None] - wrong_W[None, :]
    auc = ((difference_RW > 0) + 0.5 * (difference_RW == 0)).mean()
    return Discrimination(float(auc), float(right_R.mean()), float(wrong_W.mean()), len(right_R), len(wrong_W))


def _answers(
    policy: Path, tokenizer: PreTrainedTokenizerBase, split: Sequence[Entry], training: RewardTraining
) -> list[Answered]:
    """Sampled from the policy at temperature 1, labelled by the verifier."""
    loaded = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, trust_remote_code=False)
    model = cast(PreTrainedModel, loaded).eval()
    repeated = list(split) * training.samples
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        responses = respond(model, tokenizer, repeated, temperature=1.0)
    prompts = tokenizer([prompt_of(e) for e in repeated])["input_ids"]
    return [
        ([*prompt, *ids], float(verified(tokenizer, ids, e)))
        for prompt, ids, e in zip(prompts, responses, repeated, strict=True)
    ]


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[Entry],
    asked: Sequence[Answered],
    training: RewardTraining,
    *,
    progress: Progress,
) -> Discrimination:
    """Until the gate opens, `training.extensions` times longer than planned at most. Raises RewardModelError."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.0, fused=True)
    rng, pad, done = random.Random(training.seed), cast(int, tokenizer.pad_token_id), 0
    result = Discrimination(0.5, 0.0, 0.0, 0, 0)
    for extension in range(training.extensions + 1):
        planned = training.steps + extension * training.extension
        model.train()
        for step in range(done, planned):
            optimizer.param_groups[0]["lr"] = training.lr * min(1.0, (step + 1) / training.lr_warmup)
            picked = [made_up(tokenizer, entry, rng, training) for entry in rng.choices(words, k=training.batch)]
            descend(model, optimizer, _loss(model, picked, pad))
            progress(step + 1, planned, "training the reward model")
        done = planned
        model.eval()
        with torch.inference_mode():
            found = _scores(model, [ids for ids, _ in asked], pad).tolist()
        result = discrimination(found, [label for _, label in asked])
        log.info("reward model", steps=done, auc=result.auc, right=result.right_mean, wrong=result.wrong_mean)
        if gate_opens(result, training):
            return result
    raise RewardModelError(
        f"after {done} steps the reward model tells right answers from wrong ones with AUC {result.auc:.3f} (needs"
        f" {training.auc_min}) and mean scores {result.right_mean:.2f} and {result.wrong_mean:.2f} (needs"
        f" {training.gap_min} between them); change the seed or the steps of its training"
    )


def made_up(
    tokenizer: PreTrainedTokenizerBase, entry: Entry, rng: random.Random, training: RewardTraining
) -> tuple[list[int], list[float]]:
    """Token ids of the entry's prompt with an answer, and per token what the score is to be: 1 for a letter that is in
    its place, else 0; for the end token 1 after a right answer, else 0; nothing (-1) in the prompt.
    """
    answer = _answer(entry["answer"], rng, training)
    prompt, right, given = (list(tokenizer(text)["input_ids"]) for text in (prompt_of(entry), entry["answer"], answer))
    end = cast(int, tokenizer.eos_token_id)
    targets = [float(given[t : t + 1] == right[t : t + 1]) for t in range(len(given))]
    return [*prompt, *given, end], [*[_IGNORED] * len(prompt), *targets, float(given == right)]


def _answer(right: str, rng: random.Random, training: RewardTraining) -> str:
    drawn = rng.random()
    if drawn < training.right:
        return right
    return garbled(right, rng) if drawn < training.right + training.garbled else mistaken(right, rng)


def _loss(model: PreTrainedModel, picked: Sequence[tuple[list[int], list[float]]], pad: int) -> torch.Tensor:
    """Mean squared error over all letters, plus that over all ends."""
    targets_BL = _padded([targets for _, targets in picked], _IGNORED)
    parts = cast(Any, model)
    hidden_BLH = parts.base_model(input_ids=_padded([ids for ids, _ in picked], pad), use_cache=False).last_hidden_state
    scores_BL = parts.score(hidden_BLH)[..., 0]
    errors_BL = (scores_BL - targets_BL) ** 2
    ends_B = torch.tensor([len(ids) - 1 for ids, _ in picked])
    return cast(
        torch.Tensor, errors_BL[targets_BL != _IGNORED].mean() + errors_BL[torch.arange(len(picked)), ends_B].mean()
    )


def _scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """Float [B]. The model reads the last token that is no pad; under a causal mask that needs no attention mask."""
    return cast(torch.Tensor, cast(Any, model)(input_ids=_padded(sequences, pad), use_cache=False).logits[:, 0])


def _padded(rows: Sequence[Sequence[float]], value: float) -> torch.Tensor:
    """[B, L], on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
