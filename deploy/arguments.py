"""What the command line's arguments may be; argparse prints what a converter raises."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path


def path(text: str) -> Path:
    """`--dir=~/runs` reaches us with its tilde."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib raises for a `~name` that nobody has


def port(text: str) -> int:
    return _between(text, 1, 65_535)


def positive(text: str) -> int:
    return _between(text, 1, sys.maxsize)


def not_negative(text: str) -> int:
    return _between(text, 0, sys.maxsize)


def above_zero(text: str) -> float:
    number = _number(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and below a billion")
    return number


def within(low: float, high: float) -> Callable[[str], float]:
    """A number from `low` to `high`."""

    def convert(text: str) -> float:
        number = _number(text)
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not between {low:g} and {high:g}")
        return number

    return convert


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _between(text: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number between {low} and {high}") from None
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"{number} is not between {low} and {high}")
    return number


def with_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all-flags", action="store_true", help="list every dotted flag with its default and limits")
    parser.epilog = "Every setting is also a flag, for example --train.optimizer.lr 1e-4; --all-flags lists them."
    parser.set_defaults(takes_flags=True)


def with_config(parser: argparse.ArgumentParser) -> None:
    with_files(parser)
    with_flags(parser)


def with_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=path, action="append", default=[], metavar="FILE", help="TOML; the last one wins"
    )


def with_debug(parser: argparse.ArgumentParser) -> None:
    """Also after the command; without a default of its own, which would undo one before it."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
