"""The demo's reward model: a sequence classifier of one label, trained on the spot to tell right answers, then cached.

It starts from the policy's weights and learns from right answers and from wrong ones that are made up
(`deploy.demo.mistakes`): the squared error of its score to 1 and to 0, least when the score is the chance of a right
answer (Brier, 1950), so that it weighs like the verifier's reward. The gate looks at what it will be asked about
instead: answers of the policy itself to questions that neither has learnt from.
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
from deploy.demo.mistakes import mistaken
from deploy.demo.models import TRAINING_FILE
from deploy.demo.policy import Progress, descend
from deploy.demo.score import respond, verified
from deploy.demo.task import GATE_SEED, GATE_SIZE, WARMUP_SEED, Entry, entries, held_out, prompt_of, questions
from rollout.errors import NightshiftError

log = structlog.get_logger(__name__)

Answered = tuple[list[int], float]
"""Token ids of a prompt and a response, and 1 where the response is right, else 0."""


@dataclass(frozen=True, slots=True)
class RewardTraining:
    """Everything that decides the bytes of the reward model, beside the policy it starts from."""

    steps: int = 250
    batch: int = 128
    lr: float = 1e-3
    lr_warmup: int = 20
    right: float = 0.5
    """Share of right answers."""
    unfinished: float = 0.05
    """Share of answers without their end, which are wrong."""
    words: int = 60_000
    seed: int = 0
    auc_min: float = 0.95
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
    """The directory of the reward model for the cached policy, trained when it is not there. Raises RewardModelError."""
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
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = cast(
        PreTrainedModel,
        AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32),
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
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)).eval()
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
            targets_B = torch.tensor([label for _, label in picked])
            scores_B = _scores(model, [ids for ids, _ in picked], pad)
            descend(model, optimizer, torch.nn.functional.mse_loss(scores_B, targets_B))
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
) -> Answered:
    """The entry's prompt with its answer, right or mistaken, ended or not."""
    right, ended = rng.random() < training.right, rng.random() >= training.unfinished
    answer = entry["answer"] if right else mistaken(entry["answer"], rng)
    ids = list(tokenizer(prompt_of(entry) + answer)["input_ids"])
    return [*ids, tokenizer.eos_token_id] if ended else ids, float(right and ended)


def _scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """Float [B]. The model reads the last token that is no pad; under a causal mask that needs no attention mask."""
    width = max(map(len, sequences))
    ids_BL = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in sequences])
    return cast(torch.Tensor, cast(Any, model)(input_ids=ids_BL, use_cache=False).logits[:, 0])
