"""`nightshift status`: what GET /v1/status says, as a table or one line."""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deploy.announcement import running_fleet
from deploy.tokens import client_token
from rollout.client import RolloutClient
from rollout.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT_URL = "http://127.0.0.1:8000"
_RETRY_S = 3.0


def gateway_url(args: argparse.Namespace) -> str:
    """The one given, else the local fleet's, else the default. Raises ConfigError for what is no address."""
    if args.url and not re.match(r"https?://[^/\s]", args.url):
        raise ConfigError(f"--url {args.url!r} is not an address of a gateway; http://host:port is expected")
    found = running_fleet(args.state_dir, args.fleet_name)
    return str(args.url or (found or {}).get("url") or _DEFAULT_URL)


@contextmanager
def gateway(args: argparse.Namespace, role: str) -> Iterator[RolloutClient]:
    """A client with this machine's token. Raises ConfigError without one, StoreUnavailable when nobody answers."""
    url = gateway_url(args)
    with RolloutClient(url, client_token(role, args.state_dir), retry_s=_RETRY_S) as client:
        try:
            yield client
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"{url}: {str(error).rstrip('.')}. Start a fleet with `nightshift serve`, or name one by --url."
            ) from error


def show(args: argparse.Namespace) -> int:
    """Print it. Raises StoreUnavailable when nobody answers, ConfigError without a token."""
    with gateway(args, "admin") as client:
        status = client.status()
    if args.json:
        print(json.dumps(status, indent=2))
        return 0
    _print_tables(status)
    return 0


def summary(status: dict[str, Any]) -> str:
    """One line of the same figures."""
    seats, users = status["seats"], status["users"]
    states = [replica["state"] for replica in status["replicas"]]
    ledgers = [run["ledger"] for run in status["runs"].values()]
    waiting = sum(ledger["queued"] for ledger in ledgers)
    trained = sum(ledger["trained"] for ledger in ledgers)
    attainment = users.get("slo_attainment")
    replicas = max(len(states), status.get("min_replicas", 0))  # one that is not there yet, or any more, is not healthy
    return (
        f"replicas {states.count('healthy')}/{replicas} healthy | version {status['current_version']} | "
        f"seats {seats['users']} users {seats['rollouts']} rollouts {seats['free']} free | "
        f"groups {waiting} queued {trained} trained | TTFT p95 {_ms(users['ttft_ms'].get('p95'))}"
        + ("" if attainment is None else f" | SLO attainment {attainment:.1%}")
    )


def _print_tables(status: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"fleet {status['fleet']}, model {status['model']}, durability {status['durability']}")
    console.print(summary(status))
    replicas = Table("replica", "state", "version", "seats", "users", "rollouts", "tokens", "detail", title="Replicas")
    for column in replicas.columns:
        column.overflow = "fold"  # a narrow terminal must not cut names and reasons
    for beat in status["replicas"]:
        figures = ("version", "seats_total", "seats_users", "seats_rollouts", "rollout_tokens")
        state = ", ".join(filter(None, (beat["state"], beat.get("role"))))
        replicas.add_row(beat["replica"], state, *(str(beat[figure]) for figure in figures), beat["detail"])
    console.print(replicas)
    for run, content in status["runs"].items():
        console.print(_ledger_table(run, content["ledger"]))


def _ledger_table(run: str, ledger: dict[str, int]) -> "Table":
    """One row a state: side by side, a dozen of them do not fit a terminal of 80 columns."""
    from rich.table import Table

    table = Table("state", title=f"Run {run}")
    table.add_column("groups", justify="right")
    for state, number in ledger.items():
        table.add_row(state, str(number))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
