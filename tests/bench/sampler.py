"""Responses of a transformers model, sampled in one batch at temperature 1, with the logprobs they were sampled at.

No engine and no clock: what comes out follows from weights, prompts and generator alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Response:
    """One sample of T tokens, the end token included."""

    token_ids_T: npt.NDArray[np.int32]
    logprobs_T: npt.NDArray[np.float32]
    """Of the whole softmax."""
    ended: bool
    """False where it was cut at the limit."""


@dataclass(slots=True)
class _Decoding:
    """The A rows of the batch that have not ended; L positions are in the cache."""

    rows_A: Tensor
    """Place of each in the result."""
    logits_AV: Tensor
    attention_AL: Tensor
    positions_A: Tensor
    """Of the next token."""
    cache: Any

    def keep(self, index_K: Tensor) -> None:
        self.rows_A, self.attention_AL = self.rows_A[index_K], self.attention_AL[index_K]
        self.positions_A = self.positions_A[index_K]
        self.cache.batch_select_indices(index_K)

    def feed(self, model: Any, tokens_A: Tensor) -> None:
        """One token a row."""
        self.attention_AL = torch.nn.functional.pad(self.attention_AL, (0, 1), value=1)
        self.logits_AV = model(
            input_ids=tokens_A[:, None],
            attention_mask=self.attention_AL,
            position_ids=self.positions_A[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.positions_A = self.positions_A + 1


@torch.inference_mode()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    max_tokens: int,
    end_id: int,
    generator: torch.Generator,
) -> list[list[Response]]:
    """`n` responses of at most `max_tokens` tokens for each of the prompts (token ids), which share its prefill.

    The model is a causal one in evaluation mode on the CPU. Responses come in the order of the prompts.
    """
    decoding = _prefill(model, prompts, n)
    ids_R: list[list[int]] = [[] for _ in range(len(prompts) * n)]
    logprobs_R: list[list[float]] = [[] for _ in ids_R]
    for left in reversed(range(max_tokens)):
        logprobs_AV = decoding.logits_AV.float().log_softmax(-1)
        tokens_A1 = torch.multinomial(logprobs_AV.exp(), 1, generator=generator)
        chosen_A = logprobs_AV.gather(-1, tokens_A1)[:, 0].tolist()
        for row, token, logprob in zip(decoding.rows_A.tolist(), tokens_A1[:, 0].tolist(), chosen_A, strict=True):
            ids_R[row].append(token)
            logprobs_R[row].append(logprob)
        (going_K,) = (tokens_A1[:, 0] != end_id).nonzero(as_tuple=True)
        if not left or not len(going_K):
            break
        decoding.keep(going_K)
        decoding.feed(model, tokens_A1[going_K, 0])
    responses = [
        Response(np.array(ids, np.int32), np.array(logprobs, np.float32), ids[-1] == end_id)
        for ids, logprobs in zip(ids_R, logprobs_R, strict=True)
    ]
    return [responses[start : start + n] for start in range(0, len(responses), n)]


def _prefill(model: Any, prompts: Sequence[Sequence[int]], n: int) -> _Decoding:
    """Every prompt once, padded on the left, then `n` rows of each."""
    width = max(len(ids) for ids in prompts)
    padding_P = torch.tensor([width - len(ids) for ids in prompts])
    ids_PL = torch.tensor([[*[0] * (width - len(ids)), *ids] for ids in prompts])
    attention_PL = (torch.arange(width) >= padding_P[:, None]).long()
    output = model(
        input_ids=ids_PL,
        attention_mask=attention_PL,
        position_ids=(attention_PL.cumsum(-1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    output.past_key_values.batch_repeat_interleave(n)
    return _Decoding(
        rows_A=torch.arange(len(prompts) * n),
        logits_AV=output.logits[:, -1].repeat_interleave(n, 0),
        attention_AL=attention_PL.repeat_interleave(n, 0),
        positions_A=(width - padding_P).repeat_interleave(n, 0),
        cache=output.past_key_values,
    )
