"""Prompts to token ids at the gateway, as the engines would do it."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from services.api_errors import ApiError, shown
from services.prompt_size import PromptBounds

_TURN_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class TokenisedPrompt:
    """A prompt as the engine and as the reward function see it."""

    ids: tuple[int, ...]
    text: str


class PromptTokenizer(Protocol):
    """Blocking; every method raises ValueError when the input cannot be tokenised."""

    vocab_size: int

    def text(self, prompt: str) -> TokenisedPrompt: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenisedPrompt: ...

    def token_ids(self, ids: Sequence[int]) -> TokenisedPrompt: ...


class HuggingFaceTokenizer:
    """The tokenizer of a local model directory."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer  # seconds of import, only where prompts are tokenised

        self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        declared = declared_vocab_size(json.loads((directory / "config.json").read_text()))
        # A tokenizer may know more tokens than the model has embeddings for, and an engine dies of such an id.
        self.vocab_size = len(self._tokenizer) if declared is None else declared

    def text(self, prompt: str) -> TokenisedPrompt:
        """With the special tokens that vLLM adds to prompts of /v1/completions."""
        return TokenisedPrompt(tuple(self._tokenizer(prompt, add_special_tokens=True)["input_ids"]), prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenisedPrompt:
        """`options` are further arguments of the chat template."""
        if not self._tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template; send text or token ids instead")
        arguments = {"add_generation_prompt": True, **options}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return TokenisedPrompt(tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]), text)

    def token_ids(self, ids: Sequence[int]) -> TokenisedPrompt:
        return TokenisedPrompt(tuple(ids), self._tokenizer.decode(list(ids)))


def declared_vocab_size(config: Mapping[str, Any]) -> int | None:
    """Embeddings of a model by its config.json, where that says it.

    >>> declared_vocab_size({"text_config": {"vocab_size": 32000}})
    32000
    """
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return None if size is None else int(size)


class PromptReader:
    """Tokenises off the event loop, one prompt after the other; a large request goes by turns with others."""

    def __init__(self, tokenizer: PromptTokenizer, bounds: PromptBounds) -> None:
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(
        self, prompts: Sequence[Any], *, field: str, status: int, options: Mapping[str, Any] | None = None
    ) -> list[TokenisedPrompt]:
        """One result per prompt; raises ApiError naming the prompt: 400 for the template's refusals, else `status`."""
        options = options or {}
        names = [f"{field}.{i}" for i in range(len(prompts))] if len(prompts) > 1 else [field]
        sizes = [self._bounds.check(p, options, name, status) for p, name in zip(prompts, names, strict=True)]
        loop = asyncio.get_running_loop()
        read: list[TokenisedPrompt] = []
        for turn in _turns(sizes):
            some = partial(self._read_some, prompts[turn], names[turn], status, options)
            read += await loop.run_in_executor(self._worker, some)
        return read

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _read_some(
        self, prompts: Sequence[Any], names: Sequence[str], status: int, options: Mapping[str, Any]
    ) -> list[TokenisedPrompt]:
        return [self._read(p, name, status, options) for p, name in zip(prompts, names, strict=True)]

    def _read(self, prompt: Any, field: str, status: int, options: Mapping[str, Any]) -> TokenisedPrompt:
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return self._read_ids(prompt, field, status)
        try:
            read = self._tokenizer.text(prompt) if isinstance(prompt, str) else self._tokenizer.chat(prompt, options)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", code="untokenisable", param=field) from error
        if not read.ids:
            raise ApiError(status, f"{field}: {shown(prompt)} has no tokens", code="empty_prompt", param=field)
        if (problem := self._beyond_vocabulary(read.ids)) is not None:
            message = f"{field}: the tokenizer knows a token that the model does not; {problem}"
            raise ApiError(400, message, code="untokenisable", param=field)
        return read

    def _read_ids(self, ids: list[int], field: str, status: int) -> TokenisedPrompt:
        if (problem := self._beyond_vocabulary(ids)) is not None:
            raise ApiError(status, f"{field}: {problem}", code="over_limit", param=field)
        return self._tokenizer.token_ids(ids)

    def _beyond_vocabulary(self, ids: Sequence[int]) -> str | None:
        highest, vocab = max(ids), self._tokenizer.vocab_size
        return f"token id {highest} is not below the model's vocabulary size of {vocab}" if highest >= vocab else None


def _turns(sizes: Sequence[int]) -> Iterator[slice]:
    """As many prompts at a time as have so many characters together, and one at least.

    >>> [(turn.start, turn.stop) for turn in _turns([60_000, 5_000, 1_000, 70_000])]
    [(0, 2), (2, 3), (3, 4)]
    """
    start, taken = 0, 0
    for i, size in enumerate(sizes):
        if i > start and taken + size > _TURN_CHARS:
            yield slice(start, i)
            start, taken = i, 0
        taken += size
    if sizes:
        yield slice(start, len(sizes))
