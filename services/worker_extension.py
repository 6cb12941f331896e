"""What Nightshift adds to vLLM's worker; this module is imported inside the worker process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform

from rollout.push_group import Seat
from services.background_receive import BackgroundReceive
from services.breaks import Pace
from services.patient_reads import read_patiently
from services.transports import nccl, nccl_refusal
from services.weights_ahead import WeightsAhead

read_patiently()
_push = BackgroundReceive()
_ahead = WeightsAhead()


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any
    rank: int
    device: Any
    parallel_config: Any
    vllm_config: Any
    add_lora: Callable[[LoRARequest], bool]
    reload_weights: Callable[..., None]

    def refresh_tied_head(self) -> bool:
        """Pack the output layer again after a reload, where it shares the embedding's weights; True if that was needed.

        On CPU the output layer of a tied model multiplies with a packed copy of the embedding that is made once, at
        load. A reload replaces the embedding and leaves the copy, so the engine would go on with the old output layer
        while everything else is new. An untied head is a layer of its own and is packed again by the reload; GPUs keep
        no copy.
        """
        return _refresh_tied_head(self.model_runner.get_model())

    def load_in_place(self, directory: str, refresh_tied_head: bool) -> str:
        """Load a directory into the weights in use; call while paused. Returns what went wrong: were it raised, the
        engine would leave the replies of other workers unread and take them for those to its next call."""
        _ahead.end()
        try:
            self.reload_weights(weights_path=directory)
            if refresh_tied_head:
                self.refresh_tied_head()
        except Exception as met:
            return repr(met)
        return ""

    def prepare_weights(self, directory: str, refresh_tied_head: bool, rest_s: float, pace: int) -> None:
        """Begin to load a directory beside the weights in use, at a `Pace`; see `WeightsAhead`."""
        finish = _refresh_tied_head if refresh_tied_head else _nothing
        _ahead.pace = Pace(pace)
        _ahead.begin(self.model_runner.get_model(), self.vllm_config, directory, finish, rest_s=rest_s)

    def prepared(self, pace: int) -> tuple[bool, str]:
        """Whether the preparation, which has this `Pace` from now on, is over, and why this worker has nothing to take
        then."""
        _ahead.pace = Pace(pace)
        return _ahead.over()

    def take_prepared(self, directory: str) -> str:
        """Compute with it from now on; call while paused. Returns why not, empty where it does."""
        if why := _ahead.take(self.model_runner, directory):
            return why
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        return ""

    def abandon_prepared(self) -> None:
        """Nobody wants what is being prepared."""
        _ahead.abandon()

    def put_back(self) -> None:
        """Compute with the model that the engine was started with, and have no second one."""
        _ahead.put_back(self.model_runner)

    def load_adapter(self, name: str, number: int, directory: str) -> tuple[float, str]:
        """Into a free place; returns the seconds that it took, in which this worker computed nothing, and what went
        wrong."""
        started, error = time.monotonic(), ""
        try:
            self.add_lora(LoRARequest(name, number, directory))
        except Exception as met:
            error = repr(met)
        return time.monotonic() - started, error

    def adapter_layers(self) -> list[str] | None:
        """Last parts of the names of the layers that an adapter can change, as model files have them; None where rank
        is not 0."""
        if self.rank != 0:
            return None
        manager = self.model_runner.lora_manager._adapter_manager
        layers = {name.rpartition(".")[2] for name in manager.modules}
        return sorted({part for layer in layers for part in manager.packed_modules_mapping.get(layer, [layer])})

    def push_refusal(self, staging: str) -> str | None:
        """Why the epoch's bytes cannot be received here with NCCL, empty when they can; None where rank is not 0."""
        if self.rank != 0:
            return None
        if why := nccl_refusal(self.device):
            return why
        if (engines := self.parallel_config.data_parallel_size) > 1:
            return f"push backend nccl needs one engine a replica, data_parallel_size={engines}; use gloo"
        return "" if Path(staging).is_dir() else f"the engine's worker does not see push.staging_dir's {staging}"

    def begin_receive(self, seat: dict[str, Any], files: list[list[Any]], directory: str) -> str | None:
        """On rank 0 start to receive an epoch's buckets into `directory`, and return: users wait while a call lasts.
        Returns what went wrong; None where rank is not 0."""
        if self.rank != 0:
            return None
        names = [(str(name), int(size)) for name, size in files]
        try:
            _push.begin(Seat(**seat), names, Path(directory), nccl(self.device))
        except Exception as met:
            return repr(met)
        return ""

    def receive_state(self, epoch: int) -> dict[str, Any] | None:
        """`done` and `error` of an epoch; None where rank is not 0."""
        if self.rank != 0:
            return None
        receipt = _push.receipt(epoch)
        return {"done": receipt.done, "error": receipt.error}


def _refresh_tied_head(model: Any) -> bool:
    if not current_platform.is_cpu():
        return False
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    if not getattr(language_model.config, "tie_word_embeddings", False):
        return False
    head = getattr(language_model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return False
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return True


def _nothing(_model: Any) -> None: ...
