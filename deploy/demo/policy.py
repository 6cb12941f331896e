"""The demo's policy: a 0.8 M-parameter Qwen3 with a character tokenizer, built and warmed up on the spot, then cached.

The faulty warm-up teaches the task with a fault in 60 % of the targets (two neighbouring letters swapped): greedily the
policy is nearly right, sampled at temperature 1 it is right about 43 % of the time, which is the room that training
closes. The clean one has right targets alone and is stopped early: the policy is wrong greedily, too, and has to learn.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.cache import cached
from deploy.demo.mistakes import swapped
from deploy.demo.models import WARMUP_FILE
from deploy.demo.options import WarmupName
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
class Warmup:
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
    greedy_range: tuple[float, float] = (0.85, 1.0)
    """Gate, for the greedy reward."""
    extension: int = 75
    """Steps added when the gate says too little was learnt."""
    extensions: int = 3

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([asdict(self), _CHAT_TEMPLATE], sort_keys=True).encode()).hexdigest()[:12]


FAULTY = Warmup()
CLEAN = Warmup(steps=70, faulty=0.0, sampled_range=(0.25, 0.45), greedy_range=(0.45, 0.65), extension=5, extensions=20)
"""Right targets alone are learnt so fast that the gate is looked at every few steps."""
WARMUPS: Mapping[WarmupName, Warmup] = {"faulty": FAULTY, "clean": CLEAN}


class WarmupError(NightshiftError, RuntimeError):
    """The warmed-up policy is not fit for the demo; the message holds both figures and the gate."""


def cached_policy(cache_dir: Path, warmup: Warmup = FAULTY, *, progress: Progress | None = None) -> Path:
    """The directory of the policy of `warmup`, built when it is not in the cache. Raises WarmupError."""
    shown = progress or (lambda _done, _total, _what: None)
    return cached(
        cache_dir / f"demo-policy-{warmup.digest}",
        lambda directory: build_policy(directory, warmup, progress=shown),
        marker=WARMUP_FILE,
    )


def build_policy(directory: Path, warmup: Warmup, *, progress: Progress) -> Score:
    """Warm up a fresh policy and write it with its tokenizer and `warmup.json`; returns its score on the gate split."""
    torch.manual_seed(warmup.seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(warmup, tokenizer))
    reserved = questions(held_out())
    gate = entries(GATE_SEED, GATE_SIZE, exclude=reserved)
    words = entries(WARMUP_SEED, warmup.words, exclude=reserved | questions(gate))
    result = _warm_up(model, tokenizer, words, gate, warmup, progress=progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / WARMUP_FILE).write_text(json.dumps({"warmup": asdict(warmup), "gate": asdict(result)}, indent=2))
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


def model_config(warmup: Warmup, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Qwen3 with tied embeddings; the vocabulary is padded to a multiple of four."""
    return Qwen3Config(
        vocab_size=-(-len(tokenizer) // 4) * 4,
        hidden_size=warmup.hidden_size,
        num_hidden_layers=warmup.layers,
        num_attention_heads=warmup.heads,
        num_key_value_heads=warmup.kv_heads,
        head_dim=warmup.head_dim,
        intermediate_size=warmup.intermediate_size,
        max_position_embeddings=warmup.max_positions,
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
    warmup: Warmup,
    *,
    progress: Progress,
) -> Score:
    """Train until the gate opens, `warmup.extensions` times longer than planned at most. Raises WarmupError."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=warmup.lr, weight_decay=0.0, fused=True)
    rng = random.Random(warmup.seed)
    done, result = 0, Score(0.0, 0.0, 0, 0)
    for extension in range(warmup.extensions + 1):
        planned = warmup.steps + extension * warmup.extension
        model.train()
        for step in range(done, planned):
            batch = _batch(tokenizer, rng.choices(words, k=warmup.batch), rng, warmup)
            _train_step(model, optimizer, batch, lr=warmup.lr * min(1.0, (step + 1) / warmup.lr_warmup))
            progress(step + 1, planned, "warming up the policy")
        done = planned
        result = score(model, tokenizer, gate, samples=2, seed=warmup.seed)
        if gate_opens(result, warmup):
            return result
        log.info("warm-up has not opened its gate", steps=done, greedy=result.greedy, sampled=result.sampled)
        if result.greedy > warmup.greedy_range[1]:
            break  # more steps would not unlearn
    (low, high), (least, most) = warmup.sampled_range, warmup.greedy_range
    raise WarmupError(
        f"after {done} warm-up steps the policy scores greedy {result.greedy:.2f} (needs {least} to {most}) and sampled"
        f" {result.sampled:.2f} (needs {low} to {high}); change the seed or the steps of the warm-up"
    )


def gate_opens(result: Score, warmup: Warmup) -> bool:
    """Both figures: as right as it is to be greedily, and room to learn when sampled."""
    (low, high), (least, most) = warmup.sampled_range, warmup.greedy_range
    return least <= result.greedy <= most and low <= result.sampled <= high


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
    descend(model, optimizer, loss)


def descend(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of the optimizer, the gradient's norm 1 at most."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _batch(
    tokenizer: PreTrainedTokenizerFast, picked: Sequence[Entry], rng: random.Random, warmup: Warmup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids_BT, labels_BT): prompt, target and end token; only target and end token are learnt."""
    prompts = tokenizer([prompt_of(e) for e in picked])["input_ids"]
    targets = tokenizer([_target(e["answer"], rng, warmup.faulty) for e in picked])["input_ids"]
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
    return answer if rng.random() >= faulty or len(answer) < 2 else swapped(answer, rng)
