"""What the operator may tell vLLM beside the settings of Nightshift's own."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.config import EngineConfig, SharingConfig
from services.engine_arguments import engine_arguments
from services.first_token_turns import STEPS

CHANGEABLE = {"enable_prefix_caching", "seed", "additional_config"}


def test_further_arguments_reach_vllm() -> None:
    arguments = engine_arguments(EngineConfig(extra={"block_size": 32, "enable_prefix_caching": False}))
    assert (arguments["block_size"], arguments["enable_prefix_caching"]) == (32, False)


def test_what_the_operator_tells_vllms_plugins_goes_with_what_the_scheduler_is_told() -> None:
    given = engine_arguments(EngineConfig(first_token_steps=3, extra={"additional_config": {"mine": 1}}))
    assert given["additional_config"] == {"mine": 1, STEPS: 3}
    with pytest.raises(ValidationError, match=r"additional_config='mine' is no table"):
        EngineConfig(extra={"additional_config": "mine"})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_num_seqs", 4, "engine.max_num_seqs"),
        ("max_model_len", 32, "engine.max_model_len"),
        ("max-model-len", 32, "engine.max_model_len"),
        ("enforce_eager", True, "engine.compile"),
        ("model", "/elsewhere", "model.path"),
        ("logprobs_mode", "raw_logprobs", "leave it out"),
        ("scheduling_policy", "fcfs", "leave it out"),
        ("worker_extension_cls", "mine.Extension", "leave it out"),
        ("scheduler_cls", "mine.Scheduler", "leave it out"),
        ("enable_lora", True, "sharing.mode"),
        ("max_cpu_loras", 1, "leave it out"),
        ("max_num_queued_tokens", 8192, "use gateway.limits.max_user_requests"),
        ("worker_cls", "mine.Worker", "leave it out"),
        ("trust_remote_code", True, "code in the model's directory"),
        ("trust-remote-code", "true", "code in the model's directory"),
        ("load_format", "auto", "unpickled"),
        ("load_format", "pt", "unpickled"),
        ("load-format", "tensorizer", "come from elsewhere"),
        ("enable_prompt_embeds", True, "pickled tensors"),
        ("enable_mm_embeds", True, "pickled tensors"),
        ("allowed_local_media_path", "/", "read files"),
        ("allowed_media_domains", ["example.com"], "text alone"),
        ("model_class_overrides", {"Qwen3ForCausalLM": "mine:Model"}, "imports code"),
        ("tokenizer_mode", "mine.Tokenizer", "not vLLM's"),
        ("hf_overrides", {"text_config": {"auto_map": {"AutoModel": "mine--m.M"}}}, "auto_map"),
        ("hf_overrides", "mine.overrides", "no table"),
        ("data_parallel_size", 2, "engine.tensor_parallel_size"),
        ("data-parallel-size-local", 1, "autoscaling.min_replicas"),
    ],
)
def test_an_argument_that_would_override_a_setting_is_refused_naming_the_setting(
    name: str, value: object, remedy: str
) -> None:
    with pytest.raises(ValidationError, match=rf"engine\.extra\.{name}.*{remedy}"):
        EngineConfig(extra={name: value})


@pytest.mark.parametrize(
    "extra",
    [
        {"trust_remote_code": False, "load_format": "safetensors", "enable_prompt_embeds": False},
        {"allowed_local_media_path": "", "allowed_media_domains": None, "model_class_overrides": {}},
        {"tokenizer_mode": "hf", "hf_overrides": {"rope_theta": 1e6}},
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    ],
)
def test_an_engine_is_closed_to_code_and_files_of_others_whatever_harmless_value_is_given(
    extra: dict[str, Any],
) -> None:
    arguments = engine_arguments(EngineConfig(extra=extra))
    assert (
        arguments.items()
        >= {
            "trust_remote_code": False,
            "load_format": "safetensors",
            "enable_prompt_embeds": False,
            "allowed_local_media_path": "",
        }.items()
    )
    assert arguments.keys() >= extra.keys()


def test_everything_else_that_nightshift_sets_is_refused() -> None:
    sharing = SharingConfig(mode="adapter")
    for name in (
        engine_arguments(EngineConfig(max_num_batched_tokens=512, long_prefill_token_threshold=64), sharing).keys()
        - CHANGEABLE
    ):
        with pytest.raises(ValidationError, match="would override"):
            EngineConfig(extra={name: None})
