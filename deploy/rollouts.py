"""`nightshift rollout submit | tail | cancel`, over the gateway's HTTP."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.status import gateway
from rollout.client import RolloutClient
from rollout.errors import ConfigError
from rollout.strict_json import parse

_SOURCES = ("prompt", "messages", "prompt_ids")


def submit(args: argparse.Namespace) -> int:
    """Print the submission's id, then its samples with --tail."""
    prompts, metadata = _prompts(args)
    fields: dict[str, Any] = {
        "n": args.n,
        "sampling": {"max_tokens": args.max_tokens, "temperature": args.temperature},
        "reward": _reward(args.reward, args.reward_params),
        "purpose": args.purpose,
        "run": args.run_name or os.environ.get("NIGHTSHIFT_RUN"),
        "metadata": metadata if any(metadata) else None,
    }
    with gateway(args, "rollout") as client:
        rollout = client.submit(prompts, idempotency_key=args.key, **fields)
        print(rollout.id, flush=True)
        if args.tail:
            _follow(client, rollout.id)
    return 0


def tail(args: argparse.Namespace) -> int:
    """One JSON object a group, as it finishes."""
    with gateway(args, "rollout") as client:
        _follow(client, args.id)
    return 0


def cancel(args: argparse.Namespace) -> int:
    """Print how many groups were still to be generated."""
    with gateway(args, "rollout") as client:
        print(f"{client.cancel(args.id)} groups cancelled")
    return 0


def _reward(name: str | None, params: str | None) -> dict[str, Any] | None:
    """Raises ConfigError for parameters that are no JSON object, or of no reward."""
    if name is None:
        if params is not None:
            raise ConfigError(f"--reward-params={params} without --reward: they are the parameters of one")
        return None
    try:
        value = parse(params or "{}")
    except ValueError as error:
        raise ConfigError(f"--reward-params: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--reward-params: a JSON object is expected, this is {params}")
    return {"name": name, "params": value}


def _follow(client: RolloutClient, rollout_id: str) -> None:
    for group in client.stream(rollout_id, wait_s=None):
        print(json.dumps(asdict(group)), flush=True)


def _prompts(args: argparse.Namespace) -> tuple[list[Any], list[dict[str, Any]]]:
    """Prompts and, one for each, the other keys of their lines."""
    entries: list[dict[str, Any]] = [{"prompt": prompt} for prompt in args.prompt]
    if args.file is not None:
        entries += _lines(args.file)
    if not entries:
        raise ConfigError("no prompts: give a JSONL file or -p TEXT")
    prompts = [entry[_source(entry)] for entry in entries]
    metadata = [{key: value for key, value in entry.items() if key not in _SOURCES} for entry in entries]
    return prompts, metadata


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = parse(line, unique_keys=True)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(entry, dict) or sum(key in entry for key in _SOURCES) != 1:
            raise ConfigError(f"{path}:{number}: needs an object with exactly one of {', '.join(_SOURCES)}")
        entries.append(entry)
    return entries


def _source(entry: dict[str, Any]) -> str:
    return next(key for key in _SOURCES if key in entry)
