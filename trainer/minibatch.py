"""The optimizer steps that one batch is used for: its rows in minibatches, pass by pass.

rows --minibatches--> rows of each optimizer step --make_batch--> per rank: micro-batches, the last one a boundary
"""

from collections.abc import Sequence

import numpy as np

from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch, Row, make_batch
from trainer.partition import Packing


def minibatches(count: int, *, epochs: int, parts: int, seed: int, step: int) -> list[list[int]]:
    """Which of `count` rows each optimizer step trains on: every pass has each row once, in a new order.

    A function of its arguments alone, so that a repeated step takes the same minibatches. There are never more parts
    than rows, and their sizes differ by at most one.
    """
    parts = min(parts, count)
    if parts == 1:
        return [list(range(count))] * epochs
    split = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed % 2**63, step, epoch]).permutation(count)
        split += [sorted(part.tolist()) for part in np.array_split(order, parts)]
    return split


def plan(
    rows: Sequence[Row],
    algorithm: AlgorithmConfig,
    *,
    world_size: int,
    max_tokens: int,
    fixed_length: int,
    seed: int,
    step: int,
    packing: Packing = "off",
) -> list[list[MicroBatch]]:
    """All micro-batches of a step for each rank, the same number and boundaries on every rank.

    Losses are aggregated within a minibatch: each optimizer step follows the mean of its own rows. Raises ValueError
    when no row trains a token.
    """
    shares: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    chosen = minibatches(len(rows), epochs=algorithm.ppo_epochs, parts=algorithm.minibatches, seed=seed, step=step)
    for indices in chosen:
        parts = make_batch(
            [rows[index] for index in indices],
            world_size=world_size,
            max_tokens=max_tokens,
            aggregation=algorithm.aggregation,
            fixed_length=fixed_length,
            packing=packing,
        )
        for share, part in zip(shares, parts, strict=True):
            share.extend(part)
    return shares
