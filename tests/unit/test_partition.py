"""Rows into micro-batches by their lengths: each once, within the budget, ranks balanced, packed where it pays."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.partition import Packing, Partition, partition

unhurried = settings(deadline=None, max_examples=100)
lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=40)
packings = st.sampled_from(["auto", "on", "off"])


def chunks(split: Partition) -> list[list[int]]:
    return [chunk for rank in split.ranks for chunk in rank]


@unhurried
@given(lengths_of, st.integers(1, 4), st.integers(16, 200), packings)
def test_every_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], world_size: int, budget: int, packing: Packing
) -> None:
    split = partition(lengths, world_size=world_size, max_tokens=budget, packing=packing)
    assert split == partition(lengths, world_size=world_size, max_tokens=budget, packing=packing)
    assert len(split.ranks) == world_size
    assert sorted(index for chunk in chunks(split) for index in chunk) == list(range(len(lengths)))
    for chunk in chunks(split):
        real, width = sum(lengths[i] for i in chunk), max(lengths[i] for i in chunk)
        assert (real if split.packed else width * len(chunk)) <= budget or len(chunk) == 1


@unhurried
@given(lengths_of, st.integers(2, 4), packings)
def test_ranks_differ_by_at_most_one_row_in_tokens(lengths: list[int], world_size: int, packing: Packing) -> None:
    split = partition(lengths, world_size=world_size, max_tokens=64, packing=packing)
    load = [sum(lengths[i] for chunk in rank for i in chunk) for rank in split.ranks]
    assert max(load) - min(load) <= max(lengths)


@unhurried
@given(lengths_of, st.integers(16, 200), packings)
def test_a_micro_batch_holds_rows_of_like_length(lengths: list[int], budget: int, packing: Packing) -> None:
    (rank,) = partition(lengths, world_size=1, max_tokens=budget, packing=packing).ranks
    order = [lengths[i] for chunk in rank for i in chunk]
    assert order == sorted(lengths, reverse=True)


@unhurried
@given(lengths_of, st.integers(1, 3), st.integers(16, 200))
def test_packing_never_takes_more_micro_batches(lengths: list[int], world_size: int, budget: int) -> None:
    on, off = (
        partition(lengths, world_size=world_size, max_tokens=budget, packing=packing) for packing in ("on", "off")
    )
    assert (on.packed, off.packed) == (True, False)
    assert all(len(a) <= len(b) for a, b in zip(on.ranks, off.ranks, strict=True))


def test_auto_packs_where_a_tenth_would_be_padding() -> None:
    def packed(lengths: list[int]) -> bool:
        return partition(lengths, world_size=1, max_tokens=1000, packing="auto").packed

    assert not packed([20] * 8)
    assert not packed([20, 20, 19, 18])
    assert packed([20, 20, 15, 10])
    assert not packed([900, 30])  # each alone: nothing to pad
