"""What Nightshift adds to vLLM's worker; this module is imported inside the worker process."""

from typing import Any

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform


class WorkerExtension:
    """Mixed into vLLM's worker class through `worker_extension_cls`."""

    model_runner: Any

    def refresh_tied_head(self) -> bool:
        """Pack the output layer again after a reload, where it shares the embedding's weights; True if that was needed.

        On CPU the output layer of a tied model multiplies with a packed copy of the embedding that is made once, at
        load. A reload replaces the embedding and leaves the copy, so the engine would go on with the old output layer
        while everything else is new. An untied head is a layer of its own and is packed again by the reload; GPUs keep
        no copy.
        """
        if not current_platform.is_cpu():
            return False
        model = self.model_runner.get_model()
        language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
        if not getattr(language_model.config, "tie_word_embeddings", False):
            return False
        head = getattr(language_model, "lm_head", None)
        if head is None or not hasattr(head, "cpu_linear"):
            return False
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        return True
