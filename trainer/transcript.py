"""A sample as a reward model reads it: the policy's token ids where both share a vocabulary, else text encoded anew."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import ModelError
from trainer.models import load_tokenizer

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One prompt of P tokens and one response of T, in the policy's token ids."""

    prompt_ids_P: TokenIds
    response_ids_T: TokenIds

    @property
    def length(self) -> int:
        return len(self.prompt_ids_P) + len(self.response_ids_T)


class Transcriber:
    """Transcripts to the token ids of another model."""

    def __init__(self, policy_dir: Path, model_dir: Path, *, chat_template: bool, max_length: int | None) -> None:
        """With `chat_template` the two parts are a user's and an assistant's message in the template of `model_dir`.

        What is longer than `max_length` loses its beginning. Raises ModelError.
        """
        self._policy, self._model = load_tokenizer(policy_dir), load_tokenizer(model_dir)
        self._same = self._policy.get_vocab() == self._model.get_vocab()
        self._chat = chat_template
        self._max_length = max_length
        if chat_template and self._model.chat_template is None:
            raise ModelError(f"{model_dir}: reward_model.chat_template=true, but its tokenizer has no chat template")

    @property
    def vocabulary(self) -> int:
        """How many ids it may give."""
        return len(self._model)

    def __call__(self, transcript: Transcript) -> list[int]:
        if self._chat:
            return self._cut(self._encode(self._templated(transcript), special=False))
        ids = [*transcript.prompt_ids_P.tolist(), *transcript.response_ids_T.tolist()]
        if self._same:
            return self._cut(ids)
        return self._encode(self._policy.decode(ids, skip_special_tokens=True), special=True)

    def _templated(self, transcript: Transcript) -> str:
        texts = [
            self._policy.decode(ids.tolist(), skip_special_tokens=True)
            for ids in (transcript.prompt_ids_P, transcript.response_ids_T)
        ]
        messages = [{"role": r, "content": text} for r, text in zip(("user", "assistant"), texts, strict=True)]
        return str(self._model.apply_chat_template(messages, tokenize=False))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """`special` tokens that the tokenizer puts around a text survive when its beginning is cut off."""
        limit: dict[str, Any] = {"truncation": True, "max_length": self._max_length} if self._max_length else {}
        self._model.truncation_side = "left"
        return list(self._model(text, add_special_tokens=special, **(limit if special else {})).input_ids)

    def _cut(self, ids: list[int]) -> list[int]:
        return ids[-self._max_length :] if self._max_length else ids
