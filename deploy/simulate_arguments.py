"""Arguments of `nightshift simulate`."""

import argparse
from collections.abc import Mapping
from types import MappingProxyType

from deploy.arguments import above_zero, not_negative, path, positive, with_flags, within

_YEAR_HOURS = 8784.0
_LOOK_S = 0.1
"""The guard's, between two of which there can be but one push."""
LOAD, PEAK, PUSH_EVERY_S = "50", 3.0, 60.0
_READS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trace": (
            *("replicas", "hours", "settings", "engine", "train_step_s", "push_every_s"),
            *("way", "sweep", "json", "plot", "seed"),
        ),
        "example_trace": ("peak", "seed"),
        "calibrate": ("load", "out"),
        "validate": ("load", "json"),
    }
)
"""What each of the four questions reads of the other arguments."""


def add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "What a fleet would harvest beside the users of a trace, and what those would feel. Nothing is started. See"
        " docs/simulate.md."
    )
    parser = commands.add_parser(
        "simulate", help="what a fleet would harvest, and at what risk", description=text, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--trace", type=path, metavar="FILE", help="users: arrivals or rates, JSONL or CSV")
    what.add_argument("--example-trace", action="store_true", help="print a trace of a day to begin with")
    what.add_argument("--calibrate", type=path, metavar="BENCH", help="print the engine of a run of bench-coserve")
    what.add_argument(
        "--validate", type=path, metavar="BENCH", help="hold the simulator against a run of bench-coserve"
    )
    parser.add_argument("--replicas", type=positive, help="the most there are (default: max_replicas of the settings)")
    parser.add_argument(
        "--hours",
        type=within(0.0, _YEAR_HOURS),
        help="of the trace, from its beginning (default 24, or to the last of single users)",
    )
    parser.add_argument(
        "--settings", type=path, metavar="FILE", help="TOML as for serve: fleet.harvest, fleet.slo, ..."
    )
    parser.add_argument(
        "--engine", type=path, metavar="FILE", help="as --calibrate prints it (default: a small CPU one)"
    )
    step = within(_LOOK_S, 1e9)
    parser.add_argument("--train-step-s", type=step, help="with a trainer whose steps take so long")
    parser.add_argument(
        "--push-every-s", type=step, help=f"without a trainer: new weights so often (default {PUSH_EVERY_S:g})"
    )
    parser.add_argument(
        "--way", choices=["requests", "replicas"], help="simulate every request, or one replica at each load"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="other headrooms, reserves and budgets beside these settings"
    )
    parser.add_argument("--json", type=path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=path, metavar="FILE", help="draw the day as PNG")
    parser.add_argument("--out", type=path, metavar="FILE", help="write the engine of --calibrate")
    parser.add_argument("--load", help=f"of the run, to calibrate with (default {LOAD})")
    parser.add_argument(
        "--peak", type=above_zero, help=f"users a second at most, of --example-trace (default {PEAK:g})"
    )
    parser.add_argument("--seed", type=not_negative, help="of --trace and --example-trace (default 0)")
    with_flags(parser)
    parser.set_defaults(run=_simulate)


def unread(args: argparse.Namespace) -> str:
    """Which argument would be given in vain, and beside which other one; empty where all are read."""
    asked = next((question for question in _READS if getattr(args, question)), None)
    if asked is None:
        return ""
    for name in dict.fromkeys(name for names in _READS.values() for name in names):
        given = getattr(args, name)
        if name not in _READS[asked] and given is not None and given is not False:
            others = " or ".join(_flag(question) for question, names in _READS.items() if name in names)
            return f"{_flag(name)} does nothing with {_flag(asked)}, only with {others}: leave it out"
    if args.push_every_s is not None and args.train_step_s is not None:
        return (
            f"--push-every-s {args.push_every_s:g} does nothing with --train-step-s {args.train_step_s:g}, by whose"
            " steps new weights come: leave one of them out"
        )
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _simulate(args: argparse.Namespace, flags: list[str]) -> int:
    from deploy.simulate import run as simulate

    return simulate(args, flags)
