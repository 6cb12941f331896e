"""New weights beside those in use: a second model in the worker, so that generation stands still for a swap alone.

begin -> go_on, a few milliseconds at a time between the engine's steps -> take: what is left of it, and the two models
change places

Nothing is computed beside the engine's steps: threads that load would take its cores, and Python's lock, for far longer
than the loading takes.
"""

import copy
import math
import threading
import time
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
    """Another preparation takes the place of this one."""


class WeightsAhead:
    """At most one preparation at a time. vLLM loads a model in one call, which runs in a thread that goes on only while
    `go_on` waits for it."""

    def __init__(self) -> None:
        self._own: torch.nn.Module | None = None
        """The one that the engine was started with, once there is a second."""
        self._spare: torch.nn.Module | None = None
        self._thread: threading.Thread | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._abandoned = False
        self._directory = ""
        self._error = _NOTHING

    def begin(self, model: torch.nn.Module, config: VllmConfig, directory: str, finish: Finish) -> None:
        """Load `directory` beside `model`, then `finish` what was loaded, when `go_on` is called; what was begun before
        and is not over is abandoned."""
        self.abandon()
        self._directory, self._error = directory, ahead_refusal(config)
        if not self._error:
            self._own = self._own or model
            self._thread = threading.Thread(target=self._load, args=(model, config, finish), daemon=True)
            self._thread.start()

    def go_on(self, budget_s: float) -> tuple[bool, str]:
        """Load for so long, or a tensor more. Returns whether the preparation is over, and why there is nothing to take
        then."""
        if self._thread is not None:
            self._until = time.monotonic() + budget_s
            self._turn.release()
            self._back.acquire()
        return self._thread is None, self._error

    def take(self, runner: Any, directory: str) -> str:
        """End the preparation, and the model of `runner` becomes the spare one. Returns why not, empty where it
        does."""
        if directory != self._directory:
            return f"{self._directory or 'nothing'} is prepared"
        _, why = self.go_on(math.inf)
        if not why:
            runner.model, self._spare = self._spare, runner.model
            self._error = _NOTHING
        return why

    def put_back(self, runner: Any) -> None:
        """The model that the engine was started with is in use again, with whatever weights it has, and alone."""
        self.abandon()
        if self._own is not None:
            runner.model = self._own
        self._own = self._spare = None

    def abandon(self) -> None:
        """What was begun and is not over."""
        if self._thread is not None:
            self._abandoned = True
            self.go_on(0.0)
            self._abandoned = False
        self._error = _NOTHING

    def _load(self, model: torch.nn.Module, config: VllmConfig, finish: Finish) -> None:
        self._turn.acquire()
        try:
            self._mind_abandoned()
            spare = twin(model) if self._spare is None else self._spare
            with set_current_vllm_config(config):
                reload_weights(config, spare, self._paced(_weights(config, self._directory, spare)), None, True)
            finish(spare)
            self._spare = spare
        except Exception as error:
            self._spare, self._error = None, repr(error)
        finally:
            self._thread = None
            self._back.release()

    def _paced(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights:
            if time.monotonic() > self._until:
                self._back.release()
                self._turn.acquire()
            self._mind_abandoned()
            yield weight

    def _mind_abandoned(self) -> None:
        if self._abandoned:
            raise Abandoned(self._directory)


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
