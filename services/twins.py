"""Whether two model directories can take each other's place in a running engine."""

import json
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

_FREE = frozenset({"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"})
"""What `config.json` may say differently: none of it changes what an engine builds."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def check_twins(policy: Path, production: Path, *, dtype: str) -> None:
    """The same architecture, tokenizer, end tokens and chat template, and with `dtype` "auto" weights of the same type.

    Raises ConfigError that names both directories and what each has.
    """
    ours, theirs = _architecture(policy, dtype), _architecture(production, dtype)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise _unlike(policy, production, name, ours.get(name), theirs.get(name))
    for name in _TOKENIZERS:
        if _content(policy / name) != _content(production / name):
            raise _unlike(policy, production, name, _size(policy / name), _size(production / name))
    ours_end, theirs_end = _ends(policy), _ends(production)
    if ours_end != theirs_end:
        raise _unlike(policy, production, "generation_config.json eos_token_id", ours_end, theirs_end)
    if _template(policy) != _template(production):
        raise _unlike(policy, production, "chat template", _template(policy), _template(production))


def _unlike(policy: Path, production: Path, what: str, ours: object, theirs: object) -> ConfigError:
    return ConfigError(
        f"lending.production.path={production} has {what}={_shown(theirs)}, model.path={policy} has {_shown(ours)}: a "
        "lent replica only swaps weights, so both need one architecture, tokenizer and chat template; give a "
        "production model like the policy, or a fleet of its own to each"
    )


def _architecture(model: Path, dtype: str) -> dict[str, Any]:
    config = _json(model / "config.json")
    found = {name: value for name, value in config.items() if name not in _FREE}
    if dtype == "auto":
        found["dtype"] = config.get("dtype", config.get("torch_dtype"))
    return found


def _ends(model: Path) -> list[int]:
    """Tokens that end an answer beyond those of `config.json`: vLLM adds those of the directory that it was started
    with to every request, to rollouts' too."""
    file = model / "generation_config.json"
    found = _json(file).get("eos_token_id") if file.is_file() else None
    return sorted({found} if isinstance(found, int) else set(found or ()))


def _template(model: Path) -> str | None:
    file = model / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    settings = _json(model / "tokenizer_config.json") if (model / "tokenizer_config.json").is_file() else {}
    return settings.get("chat_template")


def _content(file: Path) -> object:
    """JSON is compared by what it says."""
    if not file.is_file():
        return None
    return _json(file) if file.suffix == ".json" else file.read_bytes()


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error


def _size(file: Path) -> str:
    return f"other {file.stat().st_size} bytes" if file.is_file() else "none"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
