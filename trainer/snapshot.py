"""Weights and optimizer state of one rank as they were, for a step of several updates that has to be undone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Copies of the tensors that an optimizer step changes in place, on their devices.

    `optimizer` is torch's own below DeepSpeed's: its parameters are the float32 masters where weights are kept twice,
    the rank's share of them under ZeRO.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # Holding the tensors themselves keeps their ids from being used again.
        self._held = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._tensors()}

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back. State that the optimizer made since becomes 0, which is how it starts."""
        for tensor in self._tensors():
            if id(tensor) in self._held:
                tensor.copy_(self._held[id(tensor)][1])
            else:
                tensor.zero_()

    def _tensors(self) -> Iterator[Tensor]:
        """Each once, though a parameter may be both the model's and the optimizer's."""
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        every = [*trained, *self._model.buffers()]
        every += [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        states: list[dict[str, Any]] = list(self._optimizer.state.values())
        every += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        yield from {id(tensor): tensor for tensor in every}.values()
