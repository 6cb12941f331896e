"""Causal attention within each row of a packed sequence, as an implementation that transformers models can be set to.

On a GPU in half precision it is torch's variable-length flash attention. Elsewhere rows of like length are padded for
the attention alone and go through torch's scaled dot product attention; a mask over the whole sequence would cost the
square of its length.
"""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollout.errors import ConfigError
from trainer.packing import Block, PackedRows, packed_rows
from trainer.partition import Packing

NAME = "packed_rows"
"""transformers makes no mask for it, because it has registered none under this name: padded rows are padded on the
right, where causal attention does not look."""
_TOLERANCE = {torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.5


class _Spread(torch.autograd.Function):
    """Tokens [T, H, D] into the slots of a padded [rows * width, H, D]. Its backward needs no addition."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots_T: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots_T)
        return tokens.new_zeros(size, *tokens.shape[1:]).index_copy_(0, slots_T, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots_T: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        ctx.size = len(padded)
        return padded.index_select(0, slots_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        spread = gradient.new_zeros(ctx.size, *gradient.shape[1:])
        return spread.index_copy_(0, ctx.saved_tensors[0], gradient), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed_rows: PackedRows | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, H_kv, N, D], to [1, N, H, D].

    Without `packed_rows` rows are those of the batch, as `sdpa` has them. Raises ValueError for a sliding window, a
    position bias, a cap on scores or sinks.
    """
    if any(more is not None for more in (sliding_window, position_bias, softcap, s_aux)):
        raise ValueError("rows are packed for plain causal attention alone: no sliding window, bias, cap or sinks")
    if packed_rows is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _flash(q, k, v, packed_rows, scaling)[None], None
    return torch.cat([_within(block, q, k, v, scaling) for block in packed_rows.blocks])[None], None


def _flash(q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    shared = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = shared > 1
    else:  # torch 2.11
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        **options,
    )
    return cast(Tensor, out)  # a pair only where more was asked for


def _within(block: Block, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Attention of one block's tokens: q [N, H, D], k and v [N, H_kv, D], to [tokens, H, D]."""
    q, k, v = (_padded(tensor, block).transpose(1, 2) for tensor in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    flat = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    flat = flat.transpose(1, 2).flatten(0, 1)
    return flat if block.slots_T is None else _collect(flat, block.slots_T)


def _padded(tensor: Tensor, block: Block) -> Tensor:
    """[N, H, D] to the block's [rows, width, H, D]."""
    tokens = tensor[block.start : block.start + block.tokens]
    if block.slots_T is not None:
        tokens = _spread(tokens, block.slots_T, block.rows * block.width)
    return tokens.reshape(block.rows, block.width, *tokens.shape[1:])


def _spread(tokens: Tensor, slots_T: Tensor, size: int) -> Tensor:
    padded: Tensor = _Spread.apply(tokens, slots_T, size)  # type: ignore[no-untyped-call]
    return padded


def _collect(padded: Tensor, slots_T: Tensor) -> Tensor:
    tokens: Tensor = _Collect.apply(padded, slots_T)  # type: ignore[no-untyped-call]
    return tokens


def enable_packing(model: PreTrainedModel, packing: Packing, device: torch.device) -> bool:
    """Set the model, which is on `device`, to packed attention unless `packing` is off; whether it was.

    Raises ConfigError where packing is on and the model cannot.
    """
    if packing == "off":
        return False
    before = model.config._attn_implementation
    reason = _unfit(model) or _fails(model, device)
    if not reason:
        return True
    model.set_attn_implementation(before)
    if packing == "on":
        raise ConfigError(f"workers.packing=on, but {reason}: use workers.packing=auto or off")
    return False


def _unfit(model: PreTrainedModel) -> str:
    """Why the model's kind cannot be packed; empty where it may."""
    kind, config = type(model).__name__, model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if not model._supports_attention_backend or config._attn_implementation != "sdpa":
        return f"{kind} computes its attention by itself ({config._attn_implementation})"
    if layers:
        return f"{kind} has layers of type {', '.join(sorted(layers))}"
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        return f"{kind} has a sliding window of {config.sliding_window}"
    return ""


_PROBE = ((1, 2, 3, 4, 5), (3, 1, 2, 4))
_OTHER = (5, 4, 3, 2, 1)


def _fails(model: PreTrainedModel, device: torch.device) -> str:
    """Sets the model to packed attention. What it then gets wrong of two packed rows: each has to be as it is alone,
    whatever the other one is.
    """
    kind = type(model).__name__
    try:
        alone = [_probe(model, [ids], device)[0] for ids in _PROBE]
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)
        first, second = _probe(model, _PROBE, device)
        _, beside_another = _probe(model, (_OTHER, _PROBE[1]), device)
    except Exception as error:  # what a model's code, or a kernel, makes of a call that it does not know
        return f"{kind} does not take packed rows: {error!r}"
    if not torch.equal(second, beside_another):
        return f"{kind} lets packed rows see each other"
    gap = max(float((a - b).abs().max()) for a, b in zip((first, second), alone, strict=True))
    tolerance = _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE)
    return "" if gap <= tolerance else f"{kind} is {gap:.3g} nats off on packed rows, tolerance {tolerance}"


def _probe(model: PreTrainedModel, rows: Any, device: torch.device) -> list[Tensor]:
    """Logprobs [length, V] of each row; packed where there are several."""
    lengths = [len(ids) for ids in rows]
    packed = {"packed_rows": packed_rows(lengths, device)} if len(rows) > 1 else {}
    positions = [position for length in lengths for position in range(length)]
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([[token for ids in rows for token in ids]], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.arange(sum(lengths), device=device),
            **packed,
        ).logits[0]
    return list(logits.float().log_softmax(-1).split(lengths))
