"""Which arguments of vLLM's an operator may give beside Nightshift's settings: `engine.extra`."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

_TAKEN = {
    "dtype": "engine.dtype",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "long_prefill_token_threshold": "engine.long_prefill_token_threshold",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enforce_eager": "engine.compile",
    "model": "model.path",
    "tokenizer": "model.path",
    "served_model_name": "model.name",
    "scheduling_policy": "",
    "logprobs_mode": "",
    "worker_cls": "",
    "worker_extension_cls": "",
    "scheduler_cls": "",
    "enable_lora": "sharing.mode",
    "max_loras": "sharing.rollout_adapters",
    "max_lora_rank": "sharing.max_lora_rank",
    "max_cpu_loras": "",
    "lora_target_modules": "sharing.target_modules",
    "disable_log_stats": "",
    "max_num_queued_reqs": "gateway.limits.max_user_requests",
    "max_num_queued_tokens": "gateway.limits.max_user_requests",
}
"""And the setting to use instead. "" is where Nightshift relies on its own value: users before rollouts and what they
feel, logprobs of the distribution that sampled, pushes into the workers, adapters that stay until their last request
ended, an engine's count of its steps. An engine's own queue limits make no difference between users and rollouts: each
would be refused for the other's sake."""

CLOSED: Mapping[str, object] = MappingProxyType(
    {
        "trust_remote_code": False,
        "load_format": "safetensors",
        "enable_prompt_embeds": False,
        "enable_mm_embeds": False,
        "allowed_local_media_path": "",
    }
)
"""Values that leave an engine no door to code, files or addresses that others choose. The only ones there are: vLLM's
own `load_format`, "auto", takes pickled weights where a directory has no safetensors."""

_OPEN = {
    "trust_remote_code": "code in the model's directory would be run",
    "load_format": "weights in other formats are unpickled, which runs what is in them, or come from elsewhere",
    "enable_prompt_embeds": "requests could bring pickled tensors",
    "enable_mm_embeds": "requests could bring pickled tensors",
    "allowed_local_media_path": "requests could read files of the engine's machine",
    "allowed_media_domains": "requests bring text alone here, and an engine fetches no addresses for them",
    "model_class_overrides": "it imports code in place of vLLM's models",
}
_TOKENIZER_MODES = ("auto", "hf", "mistral", "deepseek_v32", "deepseek_v4", "inkling", "kimi_k3", "cohere")
"""vLLM's own; others import code that is registered under their name."""


def check_extra(extra: Mapping[str, object]) -> None:
    """Raises ValueError for the first argument that is refused, with the reason and, where there is one, the setting
    to use."""
    for name, value in extra.items():
        if why := _refusal(name.replace("-", "_"), value):
            raise ValueError(f"engine.extra.{name}{why}")


def _refusal(name: str, value: object) -> str | None:
    if (knob := _TAKEN.get(name)) is not None:
        remedy = f"use {knob}" if knob else "leave it out: Nightshift relies on the value it gives"
        return f" would override what Nightshift sets; {remedy}"
    if name in _OPEN and not (value == CLOSED[name] if name in CLOSED else not value):
        return f"={value!r:.80} would override what Nightshift sets: {_OPEN[name]}; leave it out"
    if name.startswith("data_parallel"):
        return (
            f"={value!r:.80}: only the first of several data-parallel engines says how a push went; use"
            " autoscaling.min_replicas or engine.tensor_parallel_size"
        )
    return _wrong_value(name, value)


def _wrong_value(name: str, value: object) -> str | None:
    """Of an argument that may be given."""
    match name:
        case "tokenizer_mode" if value not in _TOKENIZER_MODES:
            return f"={value!r:.80} imports a tokenizer that is not vLLM's; known are {', '.join(_TOKENIZER_MODES)}"
        case "hf_overrides" | "additional_config" if not isinstance(value, Mapping):
            return f"={value!r:.80} is no table"
        case "hf_overrides" if isinstance(value, Mapping) and "auto_map" in _keys(value):
            return f"={value!r:.80} imports code by auto_map; leave that key out"
    return None


def _keys(table: Mapping[Any, Any]) -> Iterator[Any]:
    for key, value in table.items():
        yield key
        if isinstance(value, Mapping):
            yield from _keys(value)
