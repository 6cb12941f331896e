"""`make bench-coserve`: users and rollouts on one engine, arm by arm, on one fleet that stays up.

    python tests/bench/bench_coserve.py [--quick] [--arms guard --arms users] [--loads 50] [--resume] [--out runs/bench]

rollouts   rollouts alone in every seat: what the machine can harvest
users      users alone, at each load and over a compressed day
guard      users and rollouts, the seat guard holding the SLO
unguarded  users and rollouts with no SLO: users come first, and no user's wait makes rollouts fewer
constant   users and rollouts with a fixed number of seats, some around the guard's: the best that keeps the SLO is the
           oracle that the guard is held against
arrival    single users who find every seat held by rollouts

Writes coserve.json after each load, coserve.png, and coserve/<cell>.json with every request and heartbeat; --resume
goes on where a run was ended, with its SLO, capacity and finished loads, and refuses one of another plan's users or
pushes. Exits with 1 where something that has to hold was measured and does not.
"""

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

from coserve.arms import ARMS, CONSTANT, USERS
from coserve.plan import QUICK, Plan
from coserve.plot import draw
from coserve.report import DEFINITIONS, table
from coserve.start import measured
from coserve.verdicts import verdicts
from plan_arguments import add_numbers, with_numbers
from verdicts import conclude, rows

_PORT = 8766


def main() -> int:
    """Everything that was measured is on disk after each cell; the exit code says whether all that was measured and has
    to hold does."""
    arguments = _arguments()
    out: Path = arguments.out
    figures = measured(
        _plan(arguments),
        out / "coserve.json",
        port=arguments.port,
        resume=arguments.resume,
        draw=lambda found: draw(out / "coserve.png", found.content),
    )
    figures.put(verdicts=rows(verdicts(figures.cells, figures.content["comparison"])))
    print("\n".join(f"{name}: {words}" for name, words in DEFINITIONS.items()))
    print(f"\n{table(figures.cells)}\n\n{json.dumps(figures.content['comparison'], indent=2)}", flush=True)
    return conclude(figures.content["verdicts"])


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
    sys.exit(main())
