"""One forward pass of a micro-batch: logits of the window where responses are predicted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.batch import MicroBatch


def window_logits(model: Callable[..., Any], batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [B, W, V] divided by each row's temperature, and the token ids [B, W] they predict."""
    ids_BL = torch.tensor(batch.input_ids_BL, device=device)
    length = ids_BL.shape[1]
    logits = model(
        input_ids=ids_BL,
        attention_mask=torch.tensor(batch.attention_mask_BL, device=device),
        use_cache=False,
        logits_to_keep=length - batch.start,
    ).logits[:, :-1]
    temperatures = torch.tensor(batch.temperatures_B, device=device)
    return logits.float() / temperatures[:, None, None], ids_BL[:, batch.start + 1 :]


def sequence_logprobs(model: Callable[..., Any], token_ids: tuple[int, ...], device: torch.device) -> list[float]:
    """log p(token_j | tokens before j) for j = 1 .. L - 1 at temperature 1, log-softmax in float32."""
    with torch.no_grad():
        ids = torch.tensor([token_ids], device=device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        values: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return values
