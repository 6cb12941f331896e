"""The demo's policy: a 0.8 M-parameter Qwen3 with a character tokenizer, built and warmed up on the spot, then cached.

The warm-up teaches the task with a fault in 60 % of the targets (two neighbouring letters swapped): greedily the policy
is nearly right, sampled at temperature 1 it is right about 43 % of the time, which is the room that training closes.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.score import Score, score
from deploy.demo.task import GATE_SEED, GATE_SIZE, WARMUP_SEED, Entry, entries, held_out, prompt_of, questions
from rollout.errors import NightshiftError

log = structlog.get_logger(__name__)

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
)
_PAD, _END, _UNKNOWN = "<pad>", "<eos>", "<unk>"
_IGNORED = -100
Progress = Callable[[int, int, str], None]
"""Called as progress(steps done, steps planned, what)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of the policy; its hash names the cache directory."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    max_positions: int = 512
    steps: int = 300
    batch: int = 128
    lr: float = 2e-3
    lr_warmup: int = 30
    faulty: float = 0.6
    """Share of targets with one adjacent swap."""
    words: int = 60_000
    seed: int = 0
    sampled_range: tuple[float, float] = (0.35, 0.47)
    """Gate: the sampled reward must leave room for training and stay under 0.50 on any split."""
    greedy_min: float = 0.85
    extension: int = 75
    """Steps added when the gate says too little was learnt."""
    extensions: int = 3

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([asdict(self), _CHAT_TEMPLATE], sort_keys=True).encode()).hexdigest()[:12]


class WarmupError(NightshiftError, RuntimeError):
    """The warmed-up policy is not fit for the demo; the message holds both figures and the gate."""


def cached_policy(cache_dir: Path, recipe: Recipe = Recipe(), *, progress: Progress | None = None) -> Path:
    """The directory of the policy of `recipe`, built when it is not in the cache. Raises WarmupError."""
    directory = cache_dir / f"demo-policy-{recipe.digest}"
    if (directory / "warmup.json").exists():
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".demo-policy-", dir=cache_dir))
    try:
        build_policy(staging, recipe, progress=progress or (lambda _done, _total, _what: None))
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(staging, directory)  # noqa: PTH105 (the rename that makes the cache entry appear whole)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def build_policy(directory: Path, recipe: Recipe, *, progress: Progress) -> Score:
    """Warm up a fresh policy and write it with its tokenizer and `warmup.json`; returns its score on the gate split."""
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(recipe, tokenizer))
    reserved = questions(held_out())
    gate = entries(GATE_SEED, GATE_SIZE, exclude=reserved)
    words = entries(WARMUP_SEED, recipe.words, exclude=reserved | questions(gate))
    result = _warm_up(model, tokenizer, words, gate, recipe, progress=progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "warmup.json").write_text(json.dumps({"recipe": asdict(recipe), "gate": asdict(result)}, indent=2))
    return result


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character and newline, with <pad> and <eos> apart."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([_PAD, _END, _UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Qwen3 with tied embeddings; the vocabulary is padded to a multiple of four."""
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 4) * 4,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def _warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    words: Sequence[Entry],
    gate: Sequence[Entry],
    recipe: Recipe,
    *,
    progress: Progress,
) -> Score:
    """Train until the gate opens, `recipe.extensions` times longer than planned at most."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0, fused=True)
    rng = random.Random(recipe.seed)
    done, result = 0, Score(0.0, 0.0, 0, 0)
    for extension in range(recipe.extensions + 1):
        planned = recipe.steps + extension * recipe.extension
        model.train()
        for step in range(done, planned):
            batch = _batch(tokenizer, rng.choices(words, k=recipe.batch), rng, recipe)
            _train_step(model, optimizer, batch, lr=recipe.lr * min(1.0, (step + 1) / recipe.lr_warmup))
            progress(step + 1, planned, "warming up the policy")
        done = planned
        result = score(model, tokenizer, gate, samples=2, seed=recipe.seed)
        if gate_opens(result, recipe):
            return result
        log.warning("warm-up missed its gate, training on", steps=done, greedy=result.greedy, sampled=result.sampled)
    low, high = recipe.sampled_range
    raise WarmupError(
        f"after {done} warm-up steps the policy scores greedy {result.greedy:.2f} (needs at least {recipe.greedy_min})"
        f" and sampled {result.sampled:.2f} (needs {low} to {high}); change the seed or the steps of the recipe"
    )


def gate_opens(result: Score, recipe: Recipe) -> bool:
    """Both figures: nearly right greedily, and room to learn when sampled."""
    low, high = recipe.sampled_range
    return result.greedy >= recipe.greedy_min and low <= result.sampled <= high


def _train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    lr: float,
) -> None:
    optimizer.param_groups[0]["lr"] = lr
    input_ids, labels = batch
    # Right padding under a causal mask needs no attention mask: no real token sees a pad.
    logits = cast(Any, model)(input_ids=input_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _batch(
    tokenizer: PreTrainedTokenizerFast, picked: Sequence[Entry], rng: random.Random, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids_BT, labels_BT): prompt, target and end token; only target and end token are learnt."""
    prompts = tokenizer([prompt_of(e) for e in picked])["input_ids"]
    targets = tokenizer([_target(e["answer"], rng, recipe.faulty) for e in picked])["input_ids"]
    rows = [(p, [*t, tokenizer.eos_token_id]) for p, t in zip(prompts, targets, strict=True)]
    width = max(len(p) + len(t) for p, t in rows)
    input_ids = torch.full((len(rows), width), cast(int, tokenizer.pad_token_id))
    labels = torch.full((len(rows), width), _IGNORED)
    for i, (prompt, target) in enumerate(rows):
        stop = len(prompt) + len(target)
        input_ids[i, :stop] = torch.tensor(prompt + target)
        labels[i, len(prompt) : stop] = torch.tensor(target)
    return input_ids, labels


def _target(answer: str, rng: random.Random, faulty: float) -> str:
    """The answer, or with probability `faulty` the answer with two neighbouring letters swapped."""
    if rng.random() >= faulty or len(answer) < 2:
        return answer
    i = rng.randrange(len(answer) - 1)
    return answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
