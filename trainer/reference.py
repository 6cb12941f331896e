"""The frozen reference policy of one rank."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.batch import FloatArray, MicroBatch
from trainer.config import WorkersConfig
from trainer.forward import window_logprobs
from trainer.models import load_policy
from trainer.packed_attention import enable_packing


class ReferenceCore:
    """Scores tokens under the base model; needs no process group."""

    def __init__(self, model_dir: Path, workers: WorkersConfig) -> None:
        """Raises ModelError, ConfigError."""
        self._device = torch.device(workers.device)
        self._model = load_policy(model_dir, workers.dtype).to(self._device)
        self._packs = enable_packing(self._model, workers.packing, self._device)

    def packs(self) -> bool:
        """Whether packed micro-batches may be sent."""
        return self._packs

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Reference logprobs [B, W] of each micro-batch's window."""
        return window_logprobs(self._model, batches, self._device)
