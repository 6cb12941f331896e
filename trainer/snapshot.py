"""Weights and optimizer state of one rank as they were, for a step of several updates that has to be undone."""

from typing import Any

import torch

from trainer.config import WorkersConfig
from trainer.zero import changing_tensors, forget_gathered


class Snapshot:
    """Copies of the tensors that an optimizer step changes in place, on their devices.

    Where weights are kept twice these are the float32 masters too, under ZeRO the rank's share of them.
    """

    def __init__(self, engine: Any, workers: WorkersConfig) -> None:
        self._engine, self._workers = engine, workers
        # Holding the tensors themselves keeps their ids from being used again.
        self._held = {id(t): (t, t.detach().clone()) for t in changing_tensors(engine, workers)}

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back. State that the optimizer made since becomes 0, which is how it starts."""
        forget_gathered(self._engine, self._workers)
        for tensor in changing_tensors(self._engine, self._workers):
            if id(tensor) in self._held:
                tensor.copy_(self._held[id(tensor)][1])
            else:
                tensor.zero_()
