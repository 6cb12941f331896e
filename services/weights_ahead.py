"""New weights beside those in use: a second model in the worker, so that generation stands still for a swap alone.

begin (a thread that gives way) -> over -> take: the two models change places

The thread has a processor to itself where one is idle, and a small share of one where none is.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, LayerReloadingInfo
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.platforms import current_platform

from services.background import give_way

_NOTHING = "nothing is prepared"

Finish = Callable[[torch.nn.Module], object]


def ahead_refusal(config: VllmConfig) -> str:
    """Why an engine cannot change its model for another one, empty where it can: compiled code and CUDA graphs are of
    one model's tensors, and adapters are put into its layers."""
    if not current_platform.is_cpu():
        return "device memory is the engine's"
    if not config.model_config.enforce_eager:
        return "the engine's model is compiled"
    if config.lora_config is not None:
        return "adapters are in the engine's model"
    if config.speculative_config is not None:
        return "a drafter shares layers of the engine's model"
    # whatever model computes, such layers are found by their names among those that the engine was started with
    found = config.compilation_config.static_forward_context
    if named := [name for name, layer in found.items() if next(layer.parameters(), None) is not None]:
        return f"the engine finds layers with weights by name, such as {named[0]}"
    return ""


class Abandoned(Exception):
    """Nobody wants what is being prepared."""


class WeightsAhead:
    """At most one preparation at a time."""

    def __init__(self) -> None:
        self._own: torch.nn.Module | None = None
        """The one that the engine was started with, once there is a second."""
        self._spare: torch.nn.Module | None = None
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._directory = ""
        self._error = _NOTHING

    def begin(self, model: torch.nn.Module, config: VllmConfig, directory: str, finish: Finish) -> None:
        """Load `directory` beside `model`, then `finish` what was loaded; what was begun before and is not over is
        abandoned."""
        self.abandon()
        self._directory, self._error = directory, ahead_refusal(config)
        if not self._error:
            self._own = self._own or model
            self._thread = threading.Thread(target=self._load, args=(model, config, finish), daemon=True)
            self._thread.start()

    def over(self) -> tuple[bool, str]:
        """Whether the preparation is, and why there is nothing to take then."""
        return self._thread is None or not self._thread.is_alive(), self._error

    def take(self, runner: Any, directory: str) -> str:
        """The model of `runner` becomes the spare one. Returns why not, empty where it does; nothing is prepared any
        more in both cases."""
        over, why = self.over()
        if directory != self._directory:
            why = f"{self._directory or 'nothing'} is prepared"
        elif not over:
            why = "its preparation is not over"
        if not why:
            runner.model, self._spare = self._spare, runner.model
        self.abandon()
        return why

    def put_back(self, runner: Any) -> None:
        """The model that the engine was started with is in use again, with whatever weights it has, and alone."""
        self.abandon()
        if self._own is not None:
            runner.model = self._own
        self._own = self._spare = None

    def abandon(self) -> None:
        """What was begun; waits for the end of the tensor that is being loaded."""
        if self._thread is not None:
            self._abandoned = True
            self._thread.join()
            self._thread, self._abandoned = None, False
        self._error = _NOTHING

    def _load(self, model: torch.nn.Module, config: VllmConfig, finish: Finish) -> None:
        give_way()
        spare, self._spare = self._spare, None
        try:
            spare = twin(model) if spare is None else spare
            with set_current_vllm_config(config):
                reload_weights(config, spare, self._wanted(_weights(config, self._directory, spare)), None, True)
            finish(spare)
            self._spare = spare
        except Exception as error:
            self._error = repr(error)

    def _wanted(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights:
            if self._abandoned:
                raise Abandoned(self._directory)
            yield weight


def _weights(config: VllmConfig, directory: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a Hugging Face directory, as vLLM reads them."""
    loader: Any = get_model_loader(config.load_config)
    source = copy.copy(config.model_config)
    source.model, source.model_weights, source.revision = directory, "", None
    return iter(loader.get_all_weights(source, model))


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with parameters of its own, which computes into the same caches of keys and values."""
    shared = {id(tensor): tensor for module in model.modules() for tensor in _foreign(module)}
    other = copy.deepcopy(model, shared)
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        known = LAYERWISE_INFO[ours]
        parameters, buffers = ({name: _meta(t, ours) for name, t in kind.items()} for kind in known.restore_metadata)
        LAYERWISE_INFO[theirs] = LayerReloadingInfo((parameters, buffers), known.restore_device)
    return other


def _meta(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Of what `layer` had before its weights were processed, with loaders that belong to no layer yet: vLLM binds them,
    and wraps them in what remembers the layer, when it reloads one."""
    found = to_meta_tensor(tensor)
    while getattr(loader := getattr(found, "weight_loader", None), "__name__", "") == "online_process_loader":
        found.weight_loader = loader.__wrapped__  # type: ignore[union-attr]
    plain: torch.Tensor = sanitize_layer_refs(found, layer)
    return plain


def _foreign(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that a module refers to and that are not its own."""
    values = [value for value in vars(module).values() if isinstance(value, torch.Tensor | list | tuple)]
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return [one for one in flat if isinstance(one, torch.Tensor)]
