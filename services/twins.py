"""Whether two model directories can take each other's place in a running engine."""

import json
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

_FREE = frozenset({"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"})
"""What `config.json`, and a model's config inside it, may say differently: none of it changes what an engine builds."""
_QUANTIZATION = frozenset({"quantization_config", "compression_config"})
"""In which a `dtype` is that of what is stored."""
_TYPED = ("text_config", "vision_config", "encoder_config")
"""Whose type vLLM takes where `config.json` itself says none; of other models inside it the type is not known here."""
_SHOWN, _SHOWN_BEFORE = 60, 20
"""Characters of a value in a message, and how many of them come before the first that differs."""
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
    here, there = _shown(ours, theirs)
    return ConfigError(
        f"lending.production.path={production} has {what}={there}, model.path={policy} has {here}: a "
        "lent replica only swaps weights, so both need one architecture, tokenizer and chat template; give a "
        "production model like the policy, or a fleet of its own to each"
    )


def _architecture(model: Path, dtype: str) -> dict[str, Any]:
    config = _json(model / "config.json")
    found = _built(config)
    if dtype == "auto":
        found["dtype"] = _type(config)
    return found


def _built(config: dict[str, Any]) -> dict[str, Any]:
    """What of it an engine is built from, in one order."""
    return {
        name: _built(value) if isinstance(value, dict) and name not in _QUANTIZATION else value
        for name, value in sorted(config.items())
        if name not in _FREE
    }


def _type(config: dict[str, Any]) -> str | None:
    """Of the weights, as far as a config says it."""
    typed = (config, *(part for name in _TYPED if isinstance(part := config.get(name), dict)))
    said = (part.get("dtype") or part.get("torch_dtype") for part in typed)
    return next((dtype for dtype in said if dtype), None)


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


def _shown(ours: object, theirs: object) -> tuple[str, str]:
    """Both, cut to where they begin to differ.

    >>> _shown(64, 128)
    ('64', '128')
    >>> _shown("a" * 70 + "bc", "a" * 70 + "d")
    ("...aaaaaaaaaaaaaaaaaaaabc'", "...aaaaaaaaaaaaaaaaaaaad'")
    """
    here, there = repr(ours), repr(theirs)
    if max(len(here), len(there)) <= _SHOWN:
        return here, there
    unlike = (at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1])
    begin = max(0, next(unlike, min(len(here), len(there))) - _SHOWN_BEFORE)
    return _cut(here, begin), _cut(there, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
