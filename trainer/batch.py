"""From rows to micro-batches.

    Experience --rows.rows_of--> Row (one segment) --make_batch--> per rank: MicroBatch, MicroBatch, ... --by_row--> [T]

Right padding; every rank gets the same number of micro-batches, because ranks reduce gradients together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trainer.algorithm import Aggregation
from trainer.credit import Credit
from trainer.loss import aggregation_weights
from trainer.partition import Packing, partition
from trainer.rows import FloatArray, FreshGroup, Row, rows_of

IntArray = npt.NDArray[np.int64]
__all__ = ["FloatArray", "FreshGroup", "MicroBatch", "Row", "by_row", "make_batch", "rows_of"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded arrays of B rows; token arrays cover the window of W = L - 1 - start predicted positions."""

    input_ids_BL: IntArray
    attention_mask_BL: IntArray
    start: int
    """logits at positions start .. L - 2 predict the window's tokens."""
    behavior_logprobs_BW: FloatArray
    mask_BW: FloatArray
    weights_BW: FloatArray
    """Of each token's loss in the batch's loss; they add up over micro-batches and ranks."""
    on_policy_BW: FloatArray
    advantages_BW: FloatArray
    temperatures_B: FloatArray
    prompts_B: IntArray
    """Prompt tokens of each row."""
    rows_B: IntArray
    """Index of each row in what `make_batch` was given; -1 for one that only keeps a rank busy."""
    reference_logprobs_BW: FloatArray | None = None
    proximal_logprobs_BW: FloatArray | None = None
    values_BW: FloatArray | None = None
    returns_BW: FloatArray | None = None
    boundary: bool = False
    """Whether the optimizer steps after this one."""
    packed: bool = False
    """Whether the model is to see the rows as one sequence without padding (`trainer.packing`)."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """What the weights of tokens depend on besides their own row."""

    tokens: int
    sequences: int
    aggregation: Aggregation
    fixed_length: int | None


def make_batch(
    rows: Sequence[Row],
    *,
    world_size: int,
    max_tokens: int,
    aggregation: Aggregation,
    fixed_length: int | None = None,
    packing: Packing = "off",
) -> list[list[MicroBatch]]:
    """Micro-batches for each rank, of at most `max_tokens` tokens unless one row alone is longer.

    The last one of each rank is a boundary. `trainer.partition` says which rows go where and whether they are packed.
    `fixed_length` is what aggregation fixed_length divides by. Raises ValueError when no row trains a token.
    """
    whole = _Whole(sum(row.trained_tokens for row in rows), len(rows), aggregation, fixed_length)
    if whole.tokens == 0:
        raise ValueError("a batch needs at least one trained token")
    lengths = [row.length for row in rows]
    split = partition(lengths, world_size=world_size, max_tokens=max_tokens, packing=packing)
    depth = max(len(chunks) for chunks in split.ranks)
    shortest = min(range(len(rows)), key=lambda index: lengths[index])
    batches = []
    for chunks in split.ranks:
        micro = [_pad(rows, chunk, whole) for chunk in chunks]
        micro += [_without_loss(_pad(rows, [shortest], whole)) for _ in range(depth - len(chunks))]
        micro = [replace(one, packed=split.packed) for one in micro]
        micro[-1] = replace(micro[-1], boundary=True)
        batches.append(micro)
    return batches


def by_row(
    rows: Sequence[Row], shares: Sequence[Sequence[MicroBatch]], values: Sequence[Sequence[FloatArray]]
) -> list[FloatArray]:
    """What ranks computed for the windows [B, W] of their micro-batches, as one array [T] a row in the rows' order."""
    found: dict[int, FloatArray] = {}
    for share, results in zip(shares, values, strict=True):
        for batch, values_BW in zip(share, results, strict=True):
            for b, index in enumerate(batch.rows_B.tolist()):
                if index >= 0:
                    found[index] = values_BW[b, _place(rows[index], batch.start)]
    return [found[index] for index in range(len(rows))]


def _place(row: Row, start: int) -> slice:
    """Of a row's response in a window that begins at position `start`."""
    prompt = len(row.prompt_ids_P)
    return slice(prompt - 1 - start, row.length - 1 - start)


def _pad(rows: Sequence[Row], chunk: Sequence[int], whole: _Whole) -> MicroBatch:
    picked = [rows[index] for index in chunk]
    width = max(row.length for row in picked)
    start = min(len(row.prompt_ids_P) for row in picked) - 1
    ids = np.zeros((len(picked), width), np.int64)
    attention = np.zeros((len(picked), width), np.int64)
    for i, row in enumerate(picked):
        prompt, end = len(row.prompt_ids_P), row.length
        ids[i, :prompt], ids[i, prompt:end], attention[i, :end] = row.prompt_ids_P, row.response_ids_T, 1
    shape = (len(picked), width - 1 - start)

    def window(values_R: Sequence[Credit]) -> FloatArray:
        values_BW = np.zeros(shape, np.float32)
        for i, (row, values) in enumerate(zip(picked, values_R, strict=True)):
            values_BW[i, _place(row, start)] = values
        return values_BW

    def optional(values_R: Sequence[FloatArray | None]) -> FloatArray | None:
        given = [values for values in values_R if values is not None]
        return window(given) if len(given) == len(picked) else None

    mask_BW = window([row.mask_T for row in picked])
    return MicroBatch(
        input_ids_BL=ids,
        attention_mask_BL=attention,
        start=start,
        behavior_logprobs_BW=window([row.behavior_logprobs_T for row in picked]),
        mask_BW=mask_BW,
        weights_BW=_weights(mask_BW, whole),
        on_policy_BW=window([row.on_policy_T for row in picked]),
        advantages_BW=window([row.advantage for row in picked]),
        temperatures_B=np.array([row.temperature for row in picked], np.float32),
        prompts_B=np.array([len(row.prompt_ids_P) for row in picked], np.int64),
        rows_B=np.array(chunk, np.int64),
        reference_logprobs_BW=optional([row.reference_logprobs_T for row in picked]),
        proximal_logprobs_BW=optional([row.proximal_logprobs_T for row in picked]),
        values_BW=optional([row.values_T for row in picked]),
        returns_BW=optional([row.returns_T for row in picked]),
    )


def _weights(mask_BW: FloatArray, whole: _Whole) -> FloatArray:
    weights_BW: FloatArray = aggregation_weights(
        torch.from_numpy(mask_BW),
        total_tokens=whole.tokens,
        total_sequences=whole.sequences,
        aggregation=whole.aggregation,
        fixed_length=whole.fixed_length,
    ).numpy()
    return weights_BW


def _without_loss(batch: MicroBatch) -> MicroBatch:
    """A rank with less work still takes part in every reduction, with a batch that weighs nothing."""
    zero = np.zeros_like(batch.mask_BW)
    return replace(batch, mask_BW=zero, weights_BW=zero, on_policy_BW=zero, rows_B=np.full_like(batch.rows_B, -1))
