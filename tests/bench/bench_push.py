"""`make bench-push`: new weights for two replicas that serve users and generate rollouts meanwhile.

    python tests/bench/bench_push.py [--rounds 1] [--round-s 180] [--push-every-s 20] [--resume] [--out runs/bench]

Two replicas on this machine share their engines between users and rollouts, each under the seat guard; users come at
half of what both are quickly found to serve alone, and every 20 s a version is pushed to both. Writes push.json: of
each push the seconds until every replica has proved it and the longest wait of a user meanwhile, beside a plain copy of
the same bytes. Exits with 1 where a push was not verified, or tokens were lost or made twice.
"""

import argparse
import logging
import sys
from pathlib import Path

from coserve.arms import GUARD, Cell
from coserve.plan import PUSHES, Plan
from coserve.report import DEFINITIONS, table
from coserve.start import measured
from coserve.verdicts import push_verdicts
from plan_arguments import add_numbers, with_numbers
from verdicts import conclude, rows

_PORT = 8768


def main() -> int:
    """The exit code says whether what has to hold does."""
    arguments = _arguments()
    plan, path = with_numbers(PUSHES, arguments), arguments.out / "push.json"
    figures = measured(plan, path, port=arguments.port, resume=arguments.resume)
    copy_s = figures.content["copy_s"]["p50"]
    figures.put(verdicts=rows(push_verdicts(figures.cells, copy_s)))
    print("\n".join(f"{name}: {words}" for name, words in DEFINITIONS.items()))
    print(f"\n{table(figures.cells)}\n\nseconds until all had it, longest wait of a user; a copy takes {copy_s:.2f} s:")
    for seconds, felt_s in figures.cells[Cell(GUARD, *plan.loads).key]["pushes"]["all"]:
        print(" ".join("-" if one is None else f"{one:.2f}" for one in (seconds, felt_s)))
    return conclude(figures.content["verdicts"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", action="store_true", help="keep what push.json has")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--port", type=int, default=_PORT)
    add_numbers(parser, Plan)
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
