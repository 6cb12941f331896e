"""Reward of a Hugging Face directory on demo prompts, computed without any engine: generation by transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from deploy.demo.task import MAX_NEW_TOKENS, REWARD_PARAMS, Entry, prompt_of
from rollout.rewards import RewardInput, reasoning_gym


@dataclass(frozen=True, slots=True)
class Score:
    """Mean reward over prompts (and samples)."""

    greedy: float
    sampled: float
    """At temperature 1."""
    prompts: int
    samples: int
    """Per prompt."""


def score_directory(directory: Path, split: Sequence[Entry], *, samples: int = 4, seed: int = 0) -> Score:
    """Load policy and tokenizer from `directory` in float32 and score them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return score(cast(PreTrainedModel, model), tokenizer, split, samples=samples, seed=seed)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Sequence[Entry], *, samples: int, seed: int = 0
) -> Score:
    """Greedy and sampled reward; the model is left in evaluation mode."""
    model.eval()
    greedy = _rewards(model, tokenizer, split, temperature=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sampled = _rewards(model, tokenizer, list(split) * samples, temperature=1.0)
    return Score(sum(greedy) / len(greedy), sum(sampled) / len(sampled), len(split), samples)


def _rewards(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Sequence[Entry], *, temperature: float
) -> list[float]:
    """In the order of `split`."""
    responses = respond(model, tokenizer, split, temperature=temperature)
    return [verified(tokenizer, ids, e) for ids, e in zip(responses, split, strict=True)]


def respond(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Sequence[Entry], *, temperature: float
) -> list[list[int]]:
    """Token ids of one response an entry, with the end token where there is one; temperature 0 is greedy."""
    batch = tokenizer([prompt_of(e) for e in split], return_tensors="pt", padding=True, padding_side="left")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        output = cast(Any, model).generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
    found = output[:, batch["input_ids"].shape[1] :].tolist()
    return [_without_padding(ids, cast(int, tokenizer.eos_token_id)) for ids in found]


def _without_padding(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def verified(tokenizer: PreTrainedTokenizerBase, response: list[int], entry: Entry) -> float:
    """The reward of a response by the same verifier as in the engines, which for one overlooks case."""
    ended = tokenizer.eos_token_id in response
    kept = response[: response.index(tokenizer.eos_token_id)] if ended else response
    return reasoning_gym(
        RewardInput(
            prompt=prompt_of(entry),
            completion=cast(str, tokenizer.decode(kept, skip_special_tokens=True)),
            finish_reason="stop" if ended else "length",
            metadata={"answer": entry["answer"], "entry": entry},
            params=REWARD_PARAMS,
            response_ids=tuple(response),
        )
    )
