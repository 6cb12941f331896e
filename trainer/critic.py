"""The trained critic of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.batch import FloatArray, MicroBatch
from trainer.config import CriticConfig, WorkersConfig
from trainer.engine import StepResult, TrainedModel
from trainer.export import ExportResult, export_model, model_tensors
from trainer.loss import value_loss
from trainer.models import read_companions
from trainer.objective import Sums
from trainer.value_model import load_value_model, window_values


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """What every rank of the critic group is started with."""

    model_dir: Path
    """Weights to start from: a language model, a classifier or a checkpoint's critic."""
    workers: WorkersConfig
    config: CriticConfig


class CriticCore:
    """Weights, optimizer and update of one rank. `engine.join_group` must have run in this process."""

    def __init__(self, spec: CriticSpec) -> None:
        """Raises ModelError for a broken model directory, or one that holds no decoder."""
        self._spec = spec
        self.device = torch.device(spec.workers.device)
        self._rank = dist.get_rank()
        self._model = load_value_model(spec.model_dir, spec.workers.dtype)
        self._companions = read_companions(spec.model_dir) if self._rank == 0 else {}
        if spec.workers.gradient_checkpointing:
            self._model.classifier.gradient_checkpointing_enable()
            self._model.train()  # in eval mode layers are not checkpointed
        self._trained = TrainedModel(self._model, spec.workers, spec.config.optimizer)

    def values(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Values [B, W] of each micro-batch's window: what was expected before each token."""
        with torch.no_grad():
            found = [window_values(self._model, batch, self.device) for batch in batches]
        return [np.asarray(values_BW.cpu().numpy(), np.float32) for values_BW in found]

    def update(self, batches: Sequence[MicroBatch], *, lr: float, hold: bool = False) -> StepResult:
        """The AdamW steps of a batch, all or none; see `engine.TrainedModel.update`. Raises ValueError."""
        return self._trained.update(batches, self._loss, lr=lr, hold=hold)

    def release(self, *, undo: bool) -> None:
        """End a held update, after undoing it with `undo`."""
        self._trained.release(undo=undo)

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Sums]:
        values_BW = window_values(self._trained.engine, batch, self.device)
        return critic_loss(values_BW, batch, self._spec.config)

    def export(self, directory: Path, *, bucket_bytes: int) -> ExportResult:
        """Rank 0 writes a directory that loads with `AutoModelForSequenceClassification`, synced."""
        classifier = self._model.classifier
        tensors = model_tensors(classifier, keep=self._rank == 0)
        if self._rank != 0:
            return ExportResult((), ())
        return export_model(classifier, tensors, self._companions, directory, bucket_bytes=bucket_bytes)

    def save_state(self, directory: Path) -> None:
        """Write optimizer state by parameter name (rank 0; of any ZeRO stage and world size) and this rank's RNG."""
        self._trained.save_state(directory)

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote; raises CheckpointError when it belongs to another model."""
        self._trained.load_state(directory)


def critic_loss(values_BW: Tensor, batch: MicroBatch, config: CriticConfig) -> tuple[Tensor, Sums]:
    """This micro-batch's share of its minibatch's value loss, and metric sums. values_BW: float [B, W].

    Raises ValueError for a batch without values and returns.
    """
    if batch.values_BW is None or batch.returns_BW is None:
        raise ValueError("a critic is trained on rows with values and returns")
    device = values_BW.device
    mask, weights, old, returns = (
        torch.tensor(array, device=device)
        for array in (batch.mask_BW, batch.weights_BW, batch.values_BW, batch.returns_BW)
    )
    values_BW = torch.where(mask > 0, values_BW, old)  # padding may give anything
    losses = value_loss(values_BW, old, returns, config.value_clip)
    loss = config.loss_coef * (losses * weights).sum()
    moved = (values_BW.detach() - old).abs() > (config.value_clip or torch.inf)
    return loss, {
        "loss": float(loss.detach()),
        "tokens": float(mask.sum()),
        "clipped": float((moved * mask).sum()),
    }
