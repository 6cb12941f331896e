"""The rows of a micro-batch as one sequence without padding.

    padded    a a a a a .        packed     a a a a a b b b
              b b b . . .        positions  0 1 2 3 4 0 1 2

Layers that treat every token alone then see real tokens only. Attention has to know where rows end
(`trainer.packed_attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.batch import FloatArray, IntArray, MicroBatch

_LIKE = 0.75
"""Attention pads rows to the longest of their block; shorter ones than this share of it begin another."""


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring rows that attention computes together, padded to the longest of them."""

    start: int
    """First of its tokens among the N packed ones."""
    tokens: int
    rows: int
    width: int
    slots_T: Tensor | None
    """Where each token is in the padded [rows, width]; None where nothing is padded."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where rows begin and end in a sequence of N tokens; what `trainer.packed_attention` is told."""

    blocks: tuple[Block, ...]
    ends: Tensor
    """int32 [B + 1]: 0, then the end of each row."""
    longest: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch without its padding: N tokens, R of them in responses."""

    ids_1N: Tensor
    positions_1N: Tensor
    predictors_R: Tensor
    """Position in the sequence whose logits predict each response token."""
    targets_R: Tensor
    temperatures_R: FloatArray
    places_R: Tensor
    """Of each response token in the flattened window [B, W]."""
    window: tuple[int, int]
    rows: PackedRows

    def in_window(self, values_R: Tensor) -> Tensor:
        """Values of response tokens at their places in [B, W], 0 elsewhere."""
        count, width = self.window
        return values_R.new_zeros(count * width).index_copy(0, self.places_R, values_R).view(count, width)


def pack(batch: MicroBatch, device: torch.device) -> PackedBatch:
    """Leave the padding of a micro-batch out."""
    real_BL = batch.attention_mask_BL > 0
    lengths_B, width = real_BL.sum(1), batch.mask_BW.shape[1]
    columns_BL = np.broadcast_to(np.arange(real_BL.shape[1]), real_BL.shape)
    response_BL = real_BL & (columns_BL >= batch.prompts_B[:, None])
    rows_R, columns_R = np.nonzero(response_BL)

    def tensor(values: IntArray) -> Tensor:
        return torch.tensor(values, device=device)

    return PackedBatch(
        ids_1N=tensor(batch.input_ids_BL[real_BL])[None],
        positions_1N=tensor(columns_BL[real_BL])[None],
        predictors_R=tensor((lengths_B.cumsum() - lengths_B)[rows_R] + columns_R - 1),
        targets_R=tensor(batch.input_ids_BL[response_BL]),
        temperatures_R=batch.temperatures_B[rows_R],
        places_R=tensor(rows_R * width + columns_R - 1 - batch.start),
        window=(len(lengths_B), width),
        rows=packed_rows(lengths_B.tolist(), device),
    )


def packed_rows(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Of rows of these lengths one after the other."""
    blocks, start = [], 0
    for first, stop in like_lengths(lengths):
        block = _block(start, lengths[first:stop], device)
        blocks.append(block)
        start += block.tokens
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)
    return PackedRows(tuple(blocks), ends, max(lengths))


def like_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut rows into runs [first, stop) in which none is much shorter than the first, or longer.

    >>> like_lengths([100, 90, 80, 30, 30])
    [(0, 3), (3, 5)]
    """
    firsts = [0]
    for index, length in enumerate(lengths):
        if not _LIKE * lengths[firsts[-1]] <= length <= lengths[firsts[-1]]:
            firsts.append(index)
    return list(zip(firsts, [*firsts[1:], len(lengths)], strict=True))


def _block(start: int, lengths: Sequence[int], device: torch.device) -> Block:
    width, tokens = max(lengths), sum(lengths)
    if tokens == width * len(lengths):
        return Block(start, tokens, len(lengths), width, None)
    slots = np.concatenate([row * width + np.arange(length) for row, length in enumerate(lengths)])
    return Block(start, tokens, len(lengths), width, torch.tensor(slots, device=device))
