"""Environment variables that would open an engine to code from elsewhere."""

from collections.abc import Mapping

from rollout.errors import ConfigError

_OPENING = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "has vLLM's processes unpickle what they are sent, and run it",
    "VLLM_SERVER_DEV_MODE": "has vLLM serve routes that call any method of its workers",
}
_OFF = ("", "0")


def check_environment(environ: Mapping[str, str]) -> None:
    """Of a process that starts engines. Raises ConfigError that names the variables to unset."""
    opening = [f"{name}={environ[name]} {does}" for name, does in _OPENING.items() if environ.get(name, "") not in _OFF]
    if opening:
        raise ConfigError(f"{'; '.join(opening)}: no engine is started so. Unset it (or set it to 0).")
