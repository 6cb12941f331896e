"""`nightshift serve`: a local fleet in the foreground, with a line that says how it is."""

import sys
import time

import httpx

from deploy.config import NightshiftConfig, write_resolved
from deploy.local import LocalFleet
from deploy.status import summary
from deploy.tokens import token_file
from rollout.errors import StoreUnavailable

_TERMINAL_S = 2.0
_FILE_S = 60.0


class Phases:
    """Prints each phase with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, phase: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] starting {phase}", flush=True)


def serve(config: NightshiftConfig) -> int:
    """Until Ctrl-C or SIGTERM. Raises what `LocalFleet` raises, and KeyboardInterrupt where it did not serve yet."""
    phases = Phases()
    fleet = LocalFleet(config, progress=phases)
    serves = False
    try:
        with fleet:
            serves = True
            write_resolved(fleet.config, fleet.state_dir / f"{fleet.config.fleet}.config.json")
            print(_welcome(fleet), flush=True)
            _watch(fleet)
    except KeyboardInterrupt:
        if not serves:
            print("\nstopped before it served", flush=True)
            raise
        print("\nstopped", flush=True)
    return 0


def _welcome(fleet: LocalFleet) -> str:
    model, url, tokens = fleet.config.served.name, fleet.url, token_file(fleet.state_dir)
    body = f'{{"model": "{model}", "prompt": "Hello", "max_tokens": 16}}'
    return f"""
Fleet {fleet.config.fleet} serves {model} at {url}/v1 (its routes: {url}/openapi.json, with a token)
Tokens (user, rollout, admin, metrics) are in {tokens}. Try:

  TOKEN=$(python3 -c 'import json; print(json.load(open("{tokens}"))["user"])')
  curl -s {url}/v1/completions -H "Authorization: Bearer $TOKEN" \\
    -H 'Content-Type: application/json' -d '{body}'

Ctrl-C stops it.
"""


def _watch(fleet: LocalFleet) -> None:
    live = sys.stdout.isatty()
    headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
    last_line = 0.0
    with httpx.Client(base_url=fleet.url, headers=headers, timeout=10, trust_env=False) as client:
        while True:
            time.sleep(_TERMINAL_S)
            line = _keep(fleet) or _line(client)
            if live:
                print(f"\r\033[K{line}", end="", flush=True)
            elif time.monotonic() - last_line > _FILE_S:
                last_line = time.monotonic()
                print(line, flush=True)


def _keep(fleet: LocalFleet) -> str:
    try:
        fleet.keep_alive()
    except StoreUnavailable as error:
        return str(error)
    return ""


def _line(client: httpx.Client) -> str:
    try:
        answer = client.get("/v1/status")
        return summary(answer.json()) if answer.is_success else f"gateway answers {answer.status_code}"
    except (httpx.HTTPError, ValueError) as error:
        return f"gateway does not answer: {error}"
