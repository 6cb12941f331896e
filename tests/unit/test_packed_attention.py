"""Variable-length flash attention by the signatures that torch's releases give it, computed row by row."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from trainer.packed_attention import packed_attention
from trainer.packing import packed_rows

LENGTHS = (5, 3, 1)
HEADS, KV_HEADS, SIZE = 4, 2, 8


def torch_2_11(
    *packed: Any, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """It has no heads of keys that several heads of queries share."""
    query, key, value, *_ = packed
    assert query.shape == key.shape == value.shape
    assert window_size == (-1, 0)
    return _by_rows(*packed[:4], scale=scale, gqa=False)


def torch_2_12(
    *packed: Any,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    query, key, *_ = packed
    assert enable_gqa is (query.shape[1] != key.shape[1])
    assert window_size == (-1, 0)
    return _by_rows(*packed[:4], scale=scale, gqa=enable_gqa)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, scale: float | None, gqa: bool) -> Tensor:
    found = []
    for start, stop in pairwise(ends.tolist()):
        row = (tensor[start:stop].transpose(0, 1)[None] for tensor in (q, k, v))
        found.append(scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=gqa)[0].transpose(0, 1))
    return torch.cat(found)


class OnGpu(Tensor):
    """A tensor of this machine's memory that says it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_12])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_flash_attention_is_that_of_padded_blocks_under_every_torch(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, kv_heads: int
) -> None:
    random = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    query, key, value = (
        torch.randn(1, heads, total, SIZE, generator=random).bfloat16() for heads in (HEADS, kv_heads, kv_heads)
    )
    rows = packed_rows(LENGTHS, torch.device("cpu"))
    module = torch.nn.Identity()
    expected, _ = packed_attention(module, query, key, value, None, packed_rows=rows)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    found, _ = packed_attention(module, query.as_subclass(OnGpu), key, value, None, packed_rows=rows)
    torch.testing.assert_close(found.as_subclass(Tensor), expected, atol=2e-2, rtol=2e-2)
