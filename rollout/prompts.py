"""Training prompts from a JSONL file, and the order in which they are used.

Each line is an object with exactly one of `prompt` (text), `messages` (chat) or `prompt_ids` (token ids); every other
key becomes metadata for the reward function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout.codec import check_storable
from rollout.errors import CodecError, ConfigError
from rollout.messages import joined_text
from rollout.strict_json import parse

PromptSource = str | list[Mapping[str, Any]] | list[int]
Tokenise = Callable[[PromptSource], tuple[Sequence[int], str]]
"""From text, chat messages or token ids to the prompt's token ids and its text."""

_FORMS = ("prompt", "messages", "prompt_ids")
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the file, tokenised."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(path: Path, tokenise: Tokenise, *, max_prompt_tokens: int) -> list[Prompt]:
    """All prompts of a JSONL file, blank lines skipped.

    Raises ConfigError naming file and line when one is malformed or longer than `max_prompt_tokens`, and when the file
    holds none.
    """
    prompts = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    prompts.append(_parse(line, f"{path}:{number}", tokenise, max_prompt_tokens))
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


def _parse(line: bytes, where: str, tokenise: Tokenise, max_prompt_tokens: int) -> Prompt:
    if len(line) > _MAX_LINE_BYTES:
        raise ConfigError(f"{where}: {len(line)} bytes, at most {_MAX_LINE_BYTES} in a line")
    try:
        entry = parse(line, unique_keys=True)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: a JSON object is expected, not {type(entry).__name__}")
    forms = [form for form in _FORMS if form in entry]
    if len(forms) != 1:
        raise ConfigError(f"{where}: exactly one of {', '.join(_FORMS)} is expected, found {forms or 'none'}")
    source = _checked(forms[0], entry.pop(forms[0]), where)
    try:
        ids, text = tokenise(source)
    except Exception as error:  # the tokeniser and its chat template are the user's
        raise ConfigError(f"{where}: {forms[0]} cannot be tokenised: {error}") from error
    if not 1 <= len(ids) <= max_prompt_tokens:
        raise ConfigError(f"{where}: {forms[0]} has {len(ids)} tokens, allowed are 1 to {max_prompt_tokens}")
    try:
        check_storable([text, entry])
    except CodecError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Prompt(tuple(int(i) for i in ids), text, entry)


def _checked(form: str, source: Any, where: str) -> PromptSource:
    if form == "messages":
        return _messages(source, where)
    if form == "prompt":
        valid, expected = isinstance(source, str) and bool(source), "non-empty text"
    else:
        valid = isinstance(source, list) and bool(source) and all(type(i) is int and 0 <= i < 2**31 for i in source)
        expected = "a non-empty list of token ids"
    if not valid:
        raise ConfigError(f"{where}: {form} must be {expected}")
    checked: PromptSource = source
    return checked


def _messages(source: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(source, list) or not source:
        raise ConfigError(f"{where}: messages must be a non-empty list")
    return [_message(message, f"{where}: messages.{i}") for i, message in enumerate(source)]


def _message(message: Any, where: str) -> Mapping[str, Any]:
    """With text for content: templates render what they are given, and a None or a list of parts trains as such."""
    if not isinstance(message, dict):
        raise ConfigError(f"{where} must be an object with role and content, not {message!r:.80}")
    for key in ("role", "content"):
        if key not in message:
            raise ConfigError(f"{where}.{key}: required, but missing")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where}.role must be non-empty text, not {role!r:.80}")
    if isinstance(content, list):
        try:
            content = joined_text(content)
        except ValueError as error:
            raise ConfigError(f"{where}.content: {error}") from None
    if not isinstance(content, str):
        raise ConfigError(f"{where}.content must be text, not {content!r:.80}")
    return {**message, "content": content}


def epoch_order(count: int, *, seed: int, epoch: int) -> list[int]:
    """The shuffled indices of one pass over `count` prompts; the same for the same seed and epoch everywhere."""
    order: list[int] = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count).tolist()
    return order


def take(count: int, *, seed: int, cursor: int, amount: int) -> list[int]:
    """Indices number `cursor` to `cursor + amount` of the endless sequence of shuffled epochs."""
    taken: list[int] = []
    while len(taken) < amount:
        epoch, offset = divmod(cursor + len(taken), count)
        taken += epoch_order(count, seed=seed, epoch=epoch)[offset : offset + amount - len(taken)]
    return taken
