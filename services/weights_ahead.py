"""New weights beside those in use: a second model in the worker, so that generation stands still for a swap alone.

begin (a thread that gives way) -> over -> take: the two models change places

The thread gives way to all that wants a processor, and rests between tensors where there are users, and while they are
a crowd, as long as that does not put the whole off for long. The engine waits for it nowhere.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    LayerReloadingInfo,
    finalize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs
from vllm.platforms import current_platform

from services.background import give_way
from services.breaks import Breaks, Pace

_NOTHING = "nothing is prepared"
_END_S = 10.0
"""For the end of a preparation that nobody wants any more."""

Finish = Callable[[torch.nn.Module], object]


def ahead_refusal(config: VllmConfig) -> str:
    """Why an engine cannot change its model for another one, empty where it can: compiled code and CUDA graphs are of
    one model's tensors, and adapters are put into its layers."""
    # whatever model computes, such layers are found by their names among those that the engine was started with
    found = config.compilation_config.static_forward_context
    named = next((name for name, layer in found.items() if _has_weights(layer)), "")
    reasons = {
        "device memory is the engine's": not current_platform.is_cpu(),
        "the engine's model is compiled": not config.model_config.enforce_eager,
        "adapters are in the engine's model": config.lora_config is not None,
        "a drafter shares layers of the engine's model": config.speculative_config is not None,
        "only the first of several data-parallel engines answers": config.parallel_config.data_parallel_size > 1,
        f"the engine finds layers with weights by name, such as {named}": bool(named),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _has_weights(layer: torch.nn.Module) -> bool:
    """Of its own, or in what computes attention for it."""
    kept = getattr(getattr(layer, "impl", None), "__dict__", {}).values()
    return next(layer.parameters(), None) is not None or any(isinstance(one, torch.Tensor) for one in kept)


class Abandoned(Exception):
    """Nobody wants what is being prepared."""


class WeightsAhead:
    """At most one preparation at a time."""

    def __init__(self) -> None:
        self._own: torch.nn.Module | None = None
        """The one that the engine was started with, once there is a second."""
        self._spare: torch.nn.Module | None = None
        """None while something is loaded into it, too."""
        self._thread: threading.Thread | None = None
        self._wanted = ""
        """Directory that is prepared, or is to be."""
        self._error = _NOTHING
        self.pace = Pace.FREE
        """Of the preparation."""

    def begin(
        self, model: torch.nn.Module, config: VllmConfig, directory: str, finish: Finish, *, rest_s: float = 0.0
    ) -> None:
        """Load `directory` beside `model`, then `finish` what was loaded; what was begun before is abandoned. The work
        may be put off by rests of `rest_s` in all, as `pace` has it."""
        self.abandon()
        self._wanted, self._error = directory, ahead_refusal(config)
        if not self._error and self._busy:
            self._error = "the preparation before it has not ended"
        if not self._error:
            self._own = self._own or model
            spare, self._spare = self._spare, None
            self._thread = threading.Thread(
                target=self._load,
                args=(model, spare, config, directory, finish),
                kwargs={"rest_s": rest_s},
                daemon=True,
            )
            self._thread.start()

    def over(self) -> tuple[bool, str]:
        """Whether the preparation is, and why there is nothing to take then."""
        return bool(self._error) or not self._busy, self._error

    def take(self, runner: Any, directory: str) -> str:
        """The model of `runner` becomes the spare one. Returns why not, empty where it does; nothing is prepared any
        more in both cases."""
        over, why = self.over()
        if directory != self._wanted:
            why = f"{self._wanted or 'nothing'} is prepared"
        elif not over:
            why = "its preparation is not over"
        if not why:
            runner.model, self._spare = self._spare, runner.model
        self.abandon()
        return why

    def put_back(self, runner: Any) -> None:
        """The model that the engine was started with is in use again, with whatever weights it has, and alone."""
        self.end()
        if self._own is not None:
            runner.model = self._own
        self._own = self._spare = None

    def abandon(self) -> None:
        """What was begun: it ends with the tensor that is being loaded, and the engine does not wait for that."""
        self._wanted, self._error = "", _NOTHING

    def end(self) -> None:
        """Abandon it and wait, but not for ever."""
        self.abandon()
        if self._thread is not None:
            self._thread.join(_END_S)

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _load(
        self,
        model: torch.nn.Module,
        spare: torch.nn.Module | None,
        config: VllmConfig,
        directory: str,
        finish: Finish,
        *,
        rest_s: float,
    ) -> None:
        give_way()
        breaks = Breaks(most_s=rest_s, pace=lambda: self.pace if self._wanted == directory else Pace.FREE)
        try:
            breaks.take()
            spare = twin(model) if spare is None else spare
            with set_current_vllm_config(config):
                try:
                    weights = self._while_wanted(directory, breaks.between(_weights(config, directory, spare)))
                    reload_weights(config, spare, weights, None, True)
                except Exception:
                    # layers that wait for weights would take the next version's for the rest of these
                    finalize_layerwise_reload(spare, config.model_config)
                    raise
            finish(spare)
        except Exception as error:
            if self._wanted == directory:
                self._error = repr(error)
            if not isinstance(error, Abandoned):
                spare, self._own = None, model
        self._spare = spare

    def _while_wanted(
        self, directory: str, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights:
            if self._wanted != directory:
                raise Abandoned(directory)
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
        # on CPU tensors are made there anyway, and to say so changes the whole process's default for that moment
        known.restore_device = nullcontext()
        parameters, buffers = ({name: _meta(t, ours) for name, t in kind.items()} for kind in known.restore_metadata)
        LAYERWISE_INFO[theirs] = LayerReloadingInfo((parameters, buffers), nullcontext())
        _describe(ours, theirs, known.restore_metadata[0])
    return other


def _describe(ours: torch.nn.Module, theirs: torch.nn.Module, recorded: Mapping[str, torch.Tensor]) -> None:
    """Parameters that vLLM does not record for a reload, such as biases, with what a copy of them lacks: how they are
    loaded."""
    for name, parameter in ours._parameters.items():
        copied = theirs._parameters[name]
        if parameter is not None and copied is not None and name not in recorded:
            vars(copied).update(vars(restore_layer_refs(_meta(parameter, ours), theirs)))


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
