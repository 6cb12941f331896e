"""vLLM's arguments for a Nightshift engine."""

from typing import Any

from services.config import EngineConfig


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """What Nightshift relies on, then the operator's settings, then `extra` on top, all by vLLM's own names."""
    arguments: dict[str, Any] = {
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "services.worker_extension.WorkerExtension",
        "enable_prefix_caching": True,
        "seed": 0,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": not (config.device == "gpu" if config.compile is None else config.compile),
    }
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    return {**arguments, **config.extra}
