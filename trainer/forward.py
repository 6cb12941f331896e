"""One forward pass of a micro-batch, padded or packed: logits where responses are predicted."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batch import FloatArray, MicroBatch
from trainer.loss import token_logprobs
from trainer.packing import PackedBatch, pack


def window_logits(model: Callable[..., Any], batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [B, W, V] divided by each row's temperature, and the token ids [B, W] they predict."""
    ids_BL = torch.tensor(batch.input_ids_BL, device=device)
    logits = model(
        input_ids=ids_BL,
        attention_mask=torch.tensor(batch.attention_mask_BL, device=device),
        use_cache=False,
        logits_to_keep=torch.arange(batch.start, ids_BL.shape[1] - 1, device=device),
    ).logits
    return _cooled(logits, batch.temperatures_B[:, None, None]), ids_BL[:, batch.start + 1 :]


def packed_logits(model: Callable[..., Any], packed: PackedBatch) -> Tensor:
    """Logits [1, R, V] that predict each response token, divided by its row's temperature.

    The model has to be set to packed attention (`packed_attention.enable_packing`).
    """
    logits: Tensor = model(
        input_ids=packed.ids_1N,
        position_ids=packed.positions_1N,
        packed_rows=packed.rows,
        use_cache=False,
        logits_to_keep=packed.predictors_R,
    ).logits
    return _cooled(logits, packed.temperatures_R[:, None])


def _cooled(logits: Tensor, temperatures: FloatArray) -> Tensor:
    """Float32 logits over their temperatures, which are spared a pass, and another backward, where all are 1."""
    logits = logits.float()
    return logits if (temperatures == 1).all() else logits / torch.tensor(temperatures, device=logits.device)


def window_logprobs(model: Callable[..., Any], batches: Sequence[MicroBatch], device: torch.device) -> list[FloatArray]:
    """Logprobs [B, W] of the tokens of each micro-batch's window, without gradient; of packed ones 0 off responses."""
    results = []
    with torch.no_grad():
        for batch in batches:
            if batch.packed:
                packed = pack(batch, device)
                values = token_logprobs(packed_logits(model, packed), packed.targets_R[None])
                values = packed.in_window(values[0])
            else:
                values = token_logprobs(*window_logits(model, batch, device))
            results.append(np.asarray(values.cpu().numpy(), np.float32))
    return results


def sequence_logprobs(model: Callable[..., Any], token_ids: tuple[int, ...], device: torch.device) -> list[float]:
    """log p(token_j | tokens before j) for j = 1 .. L - 1 at temperature 1, log-softmax in float32."""
    with torch.no_grad():
        ids = torch.tensor([token_ids], device=device)
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        values: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return values
