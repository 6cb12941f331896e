"""vLLM's arguments for a Nightshift engine."""

from typing import Any

from services.config import EngineConfig, SharingConfig
from services.engine_extra import CLOSED
from services.first_token_turns import STEPS


def engine_arguments(config: EngineConfig, sharing: SharingConfig | None = None) -> dict[str, Any]:
    """By vLLM's own names; `extra` may change the first two and add what is not here, see `EngineConfig`."""
    plugins: Any = config.extra.get("additional_config", {})
    arguments: dict[str, Any] = {
        "enable_prefix_caching": True,
        "seed": 0,
        **config.extra,
        **CLOSED,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "services.worker_extension.WorkerExtension",
        "scheduler_cls": "services.users_first.users_first",
        "additional_config": {**plugins, STEPS: config.first_token_steps},
        "disable_log_stats": False,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": not (config.device == "gpu" if config.compile is None else config.compile),
    }
    if sharing is not None and sharing.max_loras:
        arguments |= {
            "enable_lora": True,
            # vLLM's CPU kernels compute tokens without an adapter with that of the last place, so it stays empty
            "max_loras": sharing.max_loras + (config.device == "cpu"),
            "max_lora_rank": sharing.max_lora_rank,
            "lora_target_modules": list(sharing.target_modules),
        }
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if config.long_prefill_token_threshold is not None:
        arguments["long_prefill_token_threshold"] = config.long_prefill_token_threshold
    return arguments
