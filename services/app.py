"""The Serve application: `serve run services.app:build` or `import_path: services.app:build`."""

import os
import re
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.serve.llm import LLMConfig

import services
from rollout.errors import ConfigError
from services.auth import check_hidden
from services.config import AutoscalingConfig, FleetConfig
from services.engine_arguments import engine_arguments
from services.environment import check_environment
from services.settings_errors import described
from services.twins import check_twins
from services.user_adapter import check_user_adapter

_UNKNOWN = re.compile(r"Unknown engine argument: (\S+)")
"""What Ray Serve LLM says, which looks for the names in vLLM."""
_FEWEST_ONGOING = 1024
_ROUTER = {
    "request_router_class": "services.role_router.RoleRouter",
    "request_routing_stats_period_s": 0.5,
}
_HEALTH_CHECK_PERIOD_S = 2.0
"""Serve replaces a replica that fails three; one costs a look at what the replica knows."""


def build(args: dict[str, Any]) -> serve.Application:
    """What a cluster's Serve calls with the `args` of a file, and with nothing else. Raises ConfigError."""
    check_hidden(args, _runtime_variables())
    return application(args, exposed=True)  # as far as is known here: Serve listens where the cluster was told to


def application(args: dict[str, Any], *, exposed: bool) -> serve.Application:
    """Engine deployment and gateway for a `FleetConfig` given as a JSON-able dict; `exposed` is whether other machines
    may reach the gateway. Raises ConfigError."""
    from services.gateway import deployment

    config = validated(args)
    llm = llm_config(config)
    plain = _without_tokens(args)
    engine = _engine(llm, plain)
    return deployment(
        config,
        {config.served.name: engine},
        {config.served.name: to_model_metadata(config.served.name, llm)},
        environment={"PYTHONPATH": _python_path()},
        exposed=exposed,
    )


def _engine(llm: LLMConfig, fleet: dict[str, Any]) -> serve.Application:
    try:
        return build_llm_deployment(llm, bind_kwargs={"fleet": fleet})
    except ValueError as error:
        if (unknown := _UNKNOWN.search(str(error))) is None:
            raise
        raise ConfigError(f"engine.extra.{unknown[1]} is no argument of vLLM's") from None


def validated(args: dict[str, Any]) -> FleetConfig:
    """The config, checked against the model directory, in an environment that engines may have. Raises ConfigError
    naming the field or the variable."""
    check_environment(os.environ)
    try:
        config = FleetConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(described(error)) from None
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path={config.model.path} is no Hugging Face directory: it has no config.json")
    if config.lends:
        if not (config.served.path / "config.json").is_file():
            raise ConfigError(f"lending.production.path={config.served.path} is no Hugging Face directory")
        check_twins(config.model.path, config.served.path, dtype=config.engine.dtype)
    if config.redis.url is None:
        raise ConfigError("redis.url is not set: start the fleet with `nightshift serve`, or give an address")
    check_user_adapter(config.sharing)
    return config


def llm_config(config: FleetConfig) -> LLMConfig:
    """What Ray Serve LLM needs to know of one engine."""
    cpu = config.engine.device == "cpu"
    placement: dict[str, Any] = {}
    if cpu:
        placement["placement_group_config"] = {"bundles": [{"CPU": max(config.engine.cpus, 0.01)}]}
    return LLMConfig(
        model_loading_config={"model_id": config.served.name, "model_source": str(config.served.path.resolve())},
        server_cls="services.engine:EngineServer",
        accelerator_config={"kind": "cpu" if cpu else "gpu"},
        engine_kwargs=engine_arguments(config.engine, config.sharing),
        runtime_env={"env_vars": _environment(config)},
        deployment_config=_deployment_options(config),
        log_engine_metrics=False,
        **placement,
    )


def _deployment_options(config: FleetConfig) -> dict[str, Any]:
    return {
        "request_router_config": _ROUTER,
        "autoscaling_config": autoscaling(
            config.autoscaling, min_serving=config.lending.min_serving if config.lends else 0
        ),
        "max_ongoing_requests": most_ongoing(config.engine.max_num_seqs),
        "graceful_shutdown_timeout_s": config.autoscaling.drain_s,
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "ray_actor_options": {"num_cpus": 0 if config.engine.device == "cpu" else config.engine.cpus},
    }


def most_ongoing(seats: int) -> int:
    """Requests that a replica takes at once: those beyond its seats wait in the engine, where a user goes before
    rollouts.

    >>> most_ongoing(64), most_ongoing(4096)
    (1024, 8192)
    """
    return max(_FEWEST_ONGOING, 2 * seats)


def autoscaling(scaling: AutoscalingConfig, *, min_serving: int = 0) -> dict[str, Any]:
    """Serve's `autoscaling_config`; its own delays are 0, since the policy has better ones."""
    not_the_policys = {"min_replicas", "max_replicas", "drain_s", "rate_window_s"}
    return {
        # and no `initial_replicas`: Serve goes back to so many whenever a setting changes, whatever users need
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "policy": {
            "policy_function": "services.autoscaling:UserLoadPolicy",
            "policy_kwargs": {**scaling.model_dump(mode="json", exclude=not_the_policys), "min_serving": min_serving},
        },
    }


def _environment(config: FleetConfig) -> dict[str, str]:
    """Of the replica's process and the engine processes below it."""
    environment = {"PYTHONPATH": _python_path(), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if config.engine.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.engine.kv_cache_gib)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = config.engine.omp_threads_bind
    return environment


def _python_path() -> str:
    """So that workers find this package also where it is not installed but run from its source tree."""
    root = str(Path(services.__file__).parent.parent)
    return os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)


def _runtime_variables() -> dict[str, str]:
    """Those that the task which builds has of its runtime_env."""
    return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {}) if ray.is_initialized() else {}


def _without_tokens(args: dict[str, Any]) -> dict[str, Any]:
    """Engines check no bearer tokens and so are not told them."""
    gateway = {k: v for k, v in args.get("gateway", {}).items() if k != "auth"}
    return {**args, "gateway": gateway}
