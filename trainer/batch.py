"""From scored groups to padded micro-batches.

    Experience --rows_of--> Row (one segment) --make_batch--> per rank: MicroBatch, MicroBatch, ...

Right padding; every rank gets the same number of micro-batches, because ranks reduce gradients together.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollout.types import Experience, Segment
from trainer.advantage import grpo_advantages
from trainer.loss import Aggregation, aggregation_weights

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One segment of one sample, ready to be padded. P prompt tokens, T response tokens."""

    prompt_ids_P: npt.NDArray[np.int32]
    response_ids_T: npt.NDArray[np.int32]
    behavior_logprobs_T: FloatArray
    mask_T: FloatArray
    """1 on tokens that train: sampled by the policy and fresh enough."""
    on_policy_T: FloatArray
    """1 on tokens sampled by the weights that are now being updated."""
    advantage: float
    temperature: float

    @property
    def length(self) -> int:
        return len(self.prompt_ids_P) + len(self.response_ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded arrays of B rows; token arrays cover the window of W = L - 1 - start predicted positions."""

    input_ids_BL: IntArray
    attention_mask_BL: IntArray
    start: int
    """logits at positions start .. L - 2 predict the window's tokens."""
    behavior_logprobs_BW: FloatArray
    mask_BW: FloatArray
    weights_BW: FloatArray
    """Of each token's loss in the batch's loss; they add up over micro-batches and ranks."""
    on_policy_BW: FloatArray
    advantages_B: FloatArray
    temperatures_B: FloatArray
    reference_logprobs_BW: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A group that will be trained, with the staleness verdict on its samples."""

    experience: Experience
    fresh_G: tuple[bool, ...]


def rows_of(groups: Sequence[FreshGroup], *, same_weights: Set[int]) -> list[Row]:
    """One row per segment that trains at least one token; advantages are shared by the segments of a sample.

    `same_weights` are the versions that name the policy as it is before this step. Groups keep their order, so the same
    journal entry gives the same rows.
    """
    samples = [(g, i) for g, group in enumerate(groups) for i in range(len(group.fresh_G))]
    advantages = grpo_advantages(
        torch.tensor([groups[g].experience.group.rewards_G[i] for g, i in samples], dtype=torch.float64),
        torch.tensor([g for g, _ in samples], dtype=torch.int64),
        torch.tensor([groups[g].fresh_G[i] for g, i in samples], dtype=torch.bool),
    ).tolist()
    rows = []
    for (g, i), advantage in zip(samples, advantages, strict=True):
        experience = groups[g].experience
        if groups[g].fresh_G[i]:
            temperature = experience.request.sampling.temperature
            segments = experience.group.samples_G[i].segments
            rows += [
                _row(segment, advantage, temperature, same_weights) for segment in segments if segment.loss_mask_T.any()
            ]
    return rows


def _row(segment: Segment, advantage: float, temperature: float, same_weights: Set[int]) -> Row:
    on_policy = np.zeros(len(segment.response_ids_T), np.float32)
    for span in segment.version_spans:
        if span.version in same_weights:
            on_policy[span.start : span.stop] = 1
    mask = (segment.loss_mask_T != 0).astype(np.float32)
    return Row(
        segment.prompt_ids_P,
        segment.response_ids_T,
        segment.behavior_logprobs_T,
        mask,
        on_policy * mask,
        advantage,
        temperature,
    )


def make_batch(
    rows: Sequence[Row], *, world_size: int, max_tokens: int, aggregation: Aggregation
) -> list[list[MicroBatch]]:
    """Micro-batches for each rank, of at most `max_tokens` padded tokens unless one row alone is longer.

    Rows are dealt longest first to the rank with the fewest tokens; ties by order, so the split is deterministic.
    Raises ValueError when no row trains a token.
    """
    total_tokens = sum(row.trained_tokens for row in rows)
    if total_tokens == 0:
        raise ValueError("a batch needs at least one trained token")
    totals = (total_tokens, len(rows))
    ranks = [_pack(share, max_tokens) for share in _deal(rows, world_size)]
    depth = max(len(chunks) for chunks in ranks)
    filler = [min(rows, key=lambda row: row.length)]
    batches = []
    for chunks in ranks:
        micro = [_pad(chunk, totals, aggregation) for chunk in chunks]
        micro += [_without_loss(_pad(filler, totals, aggregation)) for _ in range(depth - len(chunks))]
        batches.append(micro)
    return batches


def _deal(rows: Sequence[Row], world_size: int) -> list[list[Row]]:
    shares: list[list[Row]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for row in sorted(rows, key=lambda row: -row.length):
        rank = load.index(min(load))
        shares[rank].append(row)
        load[rank] += row.length
    return shares


def _pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows come longest first, so the first of a chunk sets its width."""
    chunks: list[list[Row]] = []
    for row in rows:
        if chunks and chunks[-1][0].length * (len(chunks[-1]) + 1) <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _pad(rows: Sequence[Row], totals: tuple[int, int], aggregation: Aggregation) -> MicroBatch:
    width = max(row.length for row in rows)
    start = min(len(row.prompt_ids_P) for row in rows) - 1
    ids = np.zeros((len(rows), width), np.int64)
    attention = np.zeros((len(rows), width), np.int64)
    window = (len(rows), width - 1 - start)
    behavior, mask, on_policy = (np.zeros(window, np.float32) for _ in range(3))
    for i, row in enumerate(rows):
        prompt, end = len(row.prompt_ids_P), row.length
        ids[i, :prompt], ids[i, prompt:end], attention[i, :end] = row.prompt_ids_P, row.response_ids_T, 1
        place = slice(prompt - 1 - start, end - 1 - start)
        behavior[i, place], mask[i, place], on_policy[i, place] = row.behavior_logprobs_T, row.mask_T, row.on_policy_T
    weights = aggregation_weights(
        torch.from_numpy(mask), total_tokens=totals[0], total_sequences=totals[1], aggregation=aggregation
    ).numpy()
    advantages = np.array([row.advantage for row in rows], np.float32)
    temperatures = np.array([row.temperature for row in rows], np.float32)
    return MicroBatch(ids, attention, start, behavior, mask, weights, on_policy, advantages, temperatures)


def _without_loss(batch: MicroBatch) -> MicroBatch:
    """A rank with less work still takes part in every reduction, with a batch that weighs nothing."""
    zero = np.zeros_like(batch.mask_BW)
    return MicroBatch(
        batch.input_ids_BL,
        batch.attention_mask_BL,
        batch.start,
        batch.behavior_logprobs_BW,
        zero,
        zero,
        zero,
        batch.advantages_B,
        batch.temperatures_B,
    )
