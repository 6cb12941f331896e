"""Reward functions: what the operator's code receives, and the built-in ones.

A reward function, plain or async, takes one `RewardInput` and returns a finite number, or a mapping with the key
"reward" whose other finite numbers are kept as its breakdown. Every built-in one knows the parameter `require_stop`:
when true, a sample that was cut at `max_tokens` scores 0.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from rollout import gym_datasets
from rollout.arithmetic import arithmetic_alone
from rollout.errors import RewardError


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One finished sample as a reward function sees it."""

    prompt: str
    completion: str
    """Decoded response, special tokens skipped."""
    finish_reason: str
    """"stop" when the sample ended by itself, "length" when it hit max_tokens."""
    metadata: Mapping[str, Any]
    """Of the request: for JSONL prompts every key besides the prompt."""
    params: Mapping[str, Any]
    """Of the request's RewardSpec."""
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reward:
    """What one sample earned."""

    value: float
    breakdown: Mapping[str, float]


MAX_BREAKDOWN = 64
"""Numbers that are kept beside a reward."""

RewardFunction = Callable[[RewardInput], Any]


def reward_of(result: object) -> Reward:
    """Read what a reward function returned; raises RewardError when it is not finite or not of a known form."""
    if isinstance(result, Mapping):
        if "reward" not in result:
            raise RewardError(f'reward mapping has no key "reward", only {sorted(map(str, result))}')
        if len(result) > MAX_BREAKDOWN + 1:
            raise RewardError(f'reward mapping has {len(result)} keys, at most {MAX_BREAKDOWN} beside "reward"')
        numbers = {str(k): _number(v) for k, v in result.items() if k != "reward"}
        breakdown = {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}
        return Reward(_reward(result["reward"]), breakdown)
    return Reward(_reward(result), {})


def _reward(value: object) -> float:
    number = _number(value)
    if number is None:
        raise RewardError(f"reward is {type(value).__name__}, not a number")
    if not math.isfinite(number):
        raise RewardError(f"reward is {number}, not finite")
    return number


def _number(value: object) -> float | None:
    """None for what is no number; numbers of any library are, and text that spells one is not."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def exact_match(sample: RewardInput) -> float:
    """1 when the completion equals metadata["answer"], both stripped; `ignore_case` compares case-insensitively."""
    found, wanted = sample.completion.strip(), _answer(sample).strip()
    if sample.params.get("ignore_case", False):
        found, wanted = found.casefold(), wanted.casefold()
    return float(found == wanted and _ended(sample))


def contains(sample: RewardInput) -> float:
    """1 when the completion contains params["text"], or metadata["answer"] where that is not given."""
    text = sample.params["text"] if "text" in sample.params else _answer(sample)
    return float(str(text) in sample.completion and _ended(sample))


def reasoning_gym(sample: RewardInput) -> float:
    """The verifier of the reasoning-gym dataset params["dataset"], for metadata["entry"] or metadata["answer"].

    With params["threshold"] the score becomes 1 from the threshold on and 0 below it. Raises RewardError for a dataset
    that `gym_datasets` does not list: the entry is the client's and the completion a model's.
    """
    if why := gym_datasets.refused(sample.params):
        raise RewardError(f"params.dataset: {why}")
    if not _ended(sample):
        return 0.0
    entry = sample.metadata.get("entry")
    if entry is None:
        entry = {"question": sample.prompt, "answer": _answer(sample), "metadata": sample.metadata.get("metadata", {})}
    score = float(_gym_scorer(sample.params["dataset"])(sample.completion.strip(), entry))
    threshold = sample.params.get("threshold")
    return score if threshold is None else float(score >= float(threshold))


def math_verify(sample: RewardInput) -> float:
    """1 when the completion's final mathematical expression equals metadata["answer"], which is a number, LaTeX, or
    text with LaTeX between dollars or in a box. Raises RewardError for an answer without an expression.
    """
    from math_verify import parse, verify

    if not _ended(sample):
        return 0.0
    # its own timeouts use signals and belong to no worker that is killed from outside
    with arithmetic_alone():
        gold = parse(_in_latex(_answer(sample)), parsing_timeout=None)
        if not gold:
            raise RewardError(f'metadata["answer"] holds no mathematical expression: {_answer(sample)[:80]!r}')
        found = parse(sample.completion, parsing_timeout=None)
        return float(bool(found) and verify(gold, found, timeout_seconds=None))


_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(\s*/\s*\d+)?\s*(\\?%)?")
_LATEX_MARKS = ("$", "\\(", "\\[", "\\boxed")
"""That the parser looks for."""

BUILTIN: Mapping[str, str] = {
    "exact_match": "rollout.rewards:exact_match",
    "contains": "rollout.rewards:contains",
    "reasoning_gym": "rollout.rewards:reasoning_gym",
    "math_verify": "rollout.rewards:math_verify",
}
"""Name -> import path of the built-in functions."""


def refused_dataset(function: str, params: Mapping[str, Any]) -> str | None:
    """Why `params["dataset"]` of a request or a run cannot score by the function of this import path."""
    return gym_datasets.refused(params) if function == BUILTIN["reasoning_gym"] else None


@lru_cache(maxsize=64)
def _gym_scorer(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    if (installed := version("reasoning-gym")) != gym_datasets.READ_VERSION:
        raise RewardError(
            f"reasoning-gym {installed} is installed, and which scorers run nothing that a client wrote is known of "
            f"{gym_datasets.READ_VERSION} alone: install that one"
        )
    scorer: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(dataset)
    return scorer


def _ended(sample: RewardInput) -> bool:
    return sample.finish_reason == "stop" or not sample.params.get("require_stop", False)


def _in_latex(answer: str) -> str:
    """Between dollars, where it is LaTeX that stands alone: the parser reads a number in other text, and no more of
    `2\\sqrt{2}` than its 2.

    >>> _in_latex("2x"), _in_latex("1,000"), _in_latex("it is $x$")
    ('$2x$', '1,000', 'it is $x$')
    """
    alone = not _NUMBER.fullmatch(answer.strip()) and not any(mark in answer for mark in _LATEX_MARKS)
    return f"${answer.strip()}$" if alone else answer


def _answer(sample: RewardInput) -> str:
    if "answer" not in sample.metadata:
        raise RewardError('this reward needs metadata["answer"]')
    return str(sample.metadata["answer"])
