"""Which rows go to which rank and into which micro-batch, by their lengths alone.

    lengths --deal--> rows of each rank, longest first --buckets--> rows of each micro-batch

Rows of like length end up in one micro-batch, so there is little to pad; packed, there is nothing to pad.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Packing = Literal["auto", "on", "off"]

_WORTH_PACKING = 1.1
"""Padded over real tokens from which a packed update was faster where it was measured (docs/train.md)."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Row numbers by rank and micro-batch; ranks may differ in how many micro-batches they have."""

    ranks: list[list[list[int]]]
    packed: bool
    """Whether the rows of a micro-batch are one sequence, and its tokens were counted without padding."""


def partition(lengths: Sequence[int], *, world_size: int, max_tokens: int, packing: Packing) -> Partition:
    """Every row once, in micro-batches of at most `max_tokens` tokens unless one row alone is longer.

    Padding counts as tokens except where rows are packed. `auto` packs where the padded micro-batches would hold a
    tenth more tokens than the rows do. Ties go by order, so the split is deterministic.
    """
    shares = deal(lengths, world_size)
    padded = [buckets(lengths, share, max_tokens, packed=False) for share in shares]
    if packing == "off" or (packing == "auto" and _padded_tokens(lengths, padded) <= _WORTH_PACKING * sum(lengths)):
        return Partition(padded, packed=False)
    return Partition([buckets(lengths, share, max_tokens, packed=True) for share in shares], packed=True)


def deal(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Row numbers of each rank, longest first: each row goes to the rank that has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += lengths[index]
    return shares


def buckets(lengths: Sequence[int], share: Sequence[int], max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Cut a rank's rows, longest first, into micro-batches; the first row of a padded one sets its width."""
    cut: list[list[int]] = []
    used = 0
    for index in share:
        cost = lengths[index] if packed or not cut else lengths[cut[-1][0]]
        if cut and used + cost <= max_tokens:
            cut[-1].append(index)
            used += cost
        else:
            cut.append([index])
            used = lengths[index]
    return cut


def _padded_tokens(lengths: Sequence[int], ranks: Sequence[Sequence[Sequence[int]]]) -> int:
    return sum(lengths[chunk[0]] * len(chunk) for chunks in ranks for chunk in chunks)
