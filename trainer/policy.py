"""The trained policy of one rank: a DeepSpeed engine without Ray around it.

Everything here runs the same on every rank of the group; what differs is the share of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithm import AlgorithmConfig
from trainer.batch import FloatArray, MicroBatch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.engine import OPTIMIZER_FILE, StepResult, TrainedModel, join_group
from trainer.export import ExportResult, export_model, model_tensors
from trainer.forward import sequence_logprobs, window_logprobs
from trainer.lora import adapter_off, add_adapter, load_adapter, whole_adapter, write_adapter
from trainer.lora_config import LoraConfig
from trainer.models import load_policy, read_companions
from trainer.objective import Sums, forward_loss
from trainer.packed_attention import enable_packing

__all__ = ["OPTIMIZER_FILE", "ExportResult", "PolicyCore", "PolicySpec", "StepResult", "join_group"]


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What every rank of the policy group is started with."""

    model_dir: Path
    """Weights to start from: the base model or a checkpoint's policy."""
    workers: WorkersConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    seed: int
    lora: LoraConfig | None = None
    """Train an adapter on the weights of `model_dir`, which stay as they are."""
    adapter_dir: Path | None = None
    """Of a checkpoint, to go on with."""


class PolicyCore:
    """Weights, optimizer and update of one rank. `join_group` must have run in this process."""

    def __init__(self, spec: PolicySpec) -> None:
        """Raises ModelError for a broken model directory, ConfigError or CheckpointError where settings do not fit."""
        self._spec = spec
        self.device = torch.device(spec.workers.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(spec.seed)
        self._model = load_policy(spec.model_dir, spec.workers.dtype)
        if spec.lora is not None:
            add_adapter(self._model, spec.lora, spec.model_dir)
            if spec.adapter_dir is not None:
                load_adapter(self._model, spec.adapter_dir)
        self._companions = read_companions(spec.model_dir) if self.rank == 0 else {}
        if spec.workers.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
            self._model.train()  # in eval mode layers are not checkpointed
        self._trained = TrainedModel(self._model, spec.workers, spec.optimizer)
        self._packs = enable_packing(self._model, spec.workers.packing, self.device)

    def packs(self) -> bool:
        """Whether packed micro-batches may be sent."""
        return self._packs

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Logprobs [B, W] of each micro-batch's window under the weights as they are."""
        return window_logprobs(self._model, batches, self.device)

    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """The same under the weights that the adapter is trained on. Only with an adapter."""
        with adapter_off(self._model):
            return self.logprobs(batches)

    def update(
        self,
        batches: Sequence[MicroBatch],
        *,
        lr: float,
        hold: bool = False,
        before_step: Callable[[Any], None] | None = None,
    ) -> StepResult:
        """The AdamW steps of a batch, all or none; see `engine.TrainedModel.update`. Raises ValueError."""
        return self._trained.update(batches, self._loss, lr=lr, hold=hold, before_step=before_step)

    def release(self, *, undo: bool) -> None:
        """End a held update, after undoing it with `undo`."""
        self._trained.release(undo=undo)

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Sums]:
        return forward_loss(self._trained.engine, batch, self._spec.algorithm, self.device)

    def canary_logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """What an engine with these weights must compute for the sequences."""
        training = self._model.training
        self._model.eval()  # as an engine computes
        try:
            return [sequence_logprobs(self._model, ids, self.device) for ids in sequences]
        finally:
            self._model.train(training)

    def export(self, directory: Path, *, bucket_bytes: int) -> ExportResult:
        """Rank 0 writes config, tokenizer files and weights into an existing directory, synced.

        Of a policy with an adapter, whole weights with the adapter added and the adapter beside them, or, by
        `lora.publish`, the adapter alone.
        """
        lora = self._spec.lora
        if lora is not None and lora.publish == "adapter":
            return self.save_policy(directory, bucket_bytes=bucket_bytes)
        # What needs every rank before anything is written, which may take long, or fail.
        adapter = whole_adapter(self._model, keep=self.rank == 0) if lora is not None else {}
        tensors = model_tensors(self._model, keep=self.rank == 0)
        if self.rank != 0:
            return ExportResult((), ())
        if lora is not None:
            write_adapter(self._model, adapter, {}, directory / "adapter")
        return export_model(self._model, tensors, self._companions, directory, bucket_bytes=bucket_bytes)

    def save_policy(self, directory: Path, *, bucket_bytes: int) -> ExportResult:
        """Rank 0 writes what a checkpoint needs of the policy into an existing directory: all of it, or the adapter."""
        if self._spec.lora is None:
            return self.export(directory, bucket_bytes=bucket_bytes)
        adapter = whole_adapter(self._model, keep=self.rank == 0)
        if self.rank != 0:
            return ExportResult((), ())
        return ExportResult(*write_adapter(self._model, adapter, self._companions, directory))

    def save_state(self, directory: Path) -> None:
        """Write optimizer state by parameter name (rank 0; of any ZeRO stage and world size) and this rank's RNG."""
        self._trained.save_state(directory)

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote; raises CheckpointError when it belongs to another model."""
        self._trained.load_state(directory)
