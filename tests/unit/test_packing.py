"""A micro-batch without its padding: every token kept, at its position, and every response token found again."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_trainer_batch import a_row
from trainer.batch import by_row, make_batch
from trainer.packing import like_lengths, pack, packed_rows

CPU = torch.device("cpu")
unhurried = settings(deadline=None, max_examples=50)
shapes_of = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@unhurried
@given(shapes_of, st.integers(1, 2))
def test_response_tokens_come_back_to_their_rows(shapes: list[tuple[int, int]], world_size: int) -> None:
    rows = [a_row(*shape, tag) for tag, shape in enumerate(shapes)]
    shares = make_batch(rows, world_size=world_size, max_tokens=40, aggregation="token_mean", packing="on")
    computed = []
    for share in shares:
        computed.append([])
        for batch in share:
            packed = pack(batch, CPU)
            assert (packed.ids_1N[0, packed.predictors_R + 1] == packed.targets_R).all()
            computed[-1].append(packed.in_window(-packed.targets_R.float()).numpy())
    for row, values in zip(rows, by_row(rows, shares, computed), strict=True):
        assert values.tolist() == row.behavior_logprobs_T.tolist()


@unhurried
@given(shapes_of)
def test_a_packed_sequence_is_its_rows_one_after_the_other(shapes: list[tuple[int, int]]) -> None:
    rows = [a_row(*shape, tag) for tag, shape in enumerate(shapes)]
    ((batch, *_),) = make_batch(rows, world_size=1, max_tokens=1000, aggregation="token_mean", packing="on")
    packed = pack(batch, CPU)
    order = [rows[index] for index in batch.rows_B]
    ids = [np.concatenate([row.prompt_ids_P, row.response_ids_T]) for row in order]
    assert packed.ids_1N[0].tolist() == np.concatenate(ids).tolist()
    assert packed.positions_1N[0].tolist() == [position for row in order for position in range(row.length)]
    assert packed.rows.ends.tolist() == [0, *np.cumsum([row.length for row in order])]
    assert packed.rows.longest == max(row.length for row in order)


@unhurried
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_blocks_cover_all_tokens_and_pad_little(lengths: list[int]) -> None:
    runs = like_lengths(lengths)
    assert [index for first, stop in runs for index in range(first, stop)] == list(range(len(lengths)))
    blocks = packed_rows(lengths, CPU).blocks
    assert [block.rows for block in blocks] == [stop - first for first, stop in runs]
    assert sum(block.tokens for block in blocks) == sum(lengths)
    for block in blocks:
        assert block.tokens >= 0.75 * block.rows * block.width
        assert block.slots_T is None or len(block.slots_T.unique()) == block.tokens
