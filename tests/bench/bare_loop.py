"""The other side of `bench_trainer`: a plain DeepSpeed loop over tensors that are ready before the clock runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer.batch import MicroBatch
from trainer.models import load_policy
from trainer.policy import PolicySpec
from trainer.zero import start_engine


@dataclass(frozen=True, slots=True)
class _Ready:
    """A micro-batch on the device."""

    ids_BL: Tensor
    kept_W: Tensor
    """Positions whose logits predict the window's tokens."""
    targets_N: Tensor
    """Those tokens, row after row."""
    weights_N: Tensor
    """Of each one's logprob in the loss."""
    boundary: bool


class BareLoop:
    """Policy gradient steps over the same micro-batches again and again; one rank, `join_group` must have run.

    Model, precision, ZeRO stage and optimizer are those of `spec`. Rows are padded on the right, where causal attention
    does not look, so that no mask is needed: the attention is the one the trainer's padded rows get.
    """

    def __init__(self, spec: PolicySpec, batches: Sequence[MicroBatch]) -> None:
        """Raises ModelError for a broken model directory."""
        device = torch.device(spec.workers.device)
        torch.manual_seed(spec.seed)
        model = load_policy(spec.model_dir, spec.workers.dtype)
        if spec.workers.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        self._engine = start_engine(model, spec.workers, spec.optimizer)
        self._batches = [_ready(batch, device) for batch in batches]

    def step(self) -> None:
        """Forward and backward of every micro-batch, then the optimizer."""
        for batch in self._batches:
            self._engine.set_gradient_accumulation_boundary(batch.boundary)
            logits = self._engine(input_ids=batch.ids_BL, use_cache=False, logits_to_keep=batch.kept_W).logits
            losses_N = cross_entropy(logits.flatten(0, 1).float(), batch.targets_N, reduction="none")
            self._engine.backward((losses_N * batch.weights_N).sum(), scale_wrt_gas=False)
            if batch.boundary:
                self._engine.step()


def _ready(batch: MicroBatch, device: torch.device) -> _Ready:
    ids_BL = torch.tensor(batch.input_ids_BL, device=device)
    return _Ready(
        ids_BL=ids_BL,
        kept_W=torch.arange(batch.start, ids_BL.shape[1] - 1, device=device),
        targets_N=ids_BL[:, batch.start + 1 :].flatten(),
        weights_N=torch.tensor(batch.weights_BW * batch.advantages_BW, device=device).flatten(),
        boundary=batch.boundary,
    )
