"""`make soak`: ten minutes of random faults on a whole Nightshift.

    python -m tests.soak [--seed N] [--minutes 10] [--every-s 30] [--out runs/soak]

A fleet of two engines, `nightshift train` under a supervisor, users and a client that submits rollouts; first
undisturbed for a while, then with a fault about every 30 s, drawn from the seed over all roles. At the end all of it
gets SIGTERM, and the auditor looks at what is left. Writes report.json and soak.png; what the processes printed is in
work/. Exits with 1 where something that has to hold does not.
"""

import argparse
import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

from deploy.demo.display import Display
from tests.bench.json_file import write_json
from tests.bench.verdicts import conclude
from tests.running_fleet import RunningFleet, start_configured
from tests.soak.audit import audit
from tests.soak.fleet import run_dir, write_configuration
from tests.soak.plan import Plan
from tests.soak.plot import draw
from tests.soak.report import build_report, table
from tests.soak.session import Told, session


def main() -> int:
    """The exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = _arguments()
    plan = Plan(arguments.seed, 60.0 * arguments.minutes, arguments.every_s)
    plan.faults()  # a time that is too short is said before anything starts
    print(f"seed {plan.seed}", flush=True)
    work: Path = (arguments.out / "work").absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with Display() as display:
        display.phase("fleet: starting")
        toml = write_configuration(work)
        with start_configured(work, toml) as (fleet, process):
            told = asyncio.run(_soak(plan, fleet, work, display))
            display.phase("SIGTERM to the fleet")
        display.phase("nightshift audit")
        found = audit(toml, run_dir(work))
    report = build_report(plan, told, found, fleet_code=process.returncode)
    write_json(arguments.out / "report.json", report)
    draw(arguments.out / "soak.png", report, told)
    print(f"\n{table(report)}", flush=True)
    return conclude(report["verdicts"])


async def _soak(plan: Plan, fleet: RunningFleet, work: Path, display: Display) -> Told:
    async with session(plan, fleet, run_dir(work), work / "train.log", display) as one:
        return await one.soak()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="of the faults (default: any)")
    parser.add_argument("--minutes", type=float, default=10.0, help="with faults")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two faults, about")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    return parser.parse_args()


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt  # so that everything that was started ends


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(main())
