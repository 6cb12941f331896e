"""A bench's plan on its command line: every number in it is an option."""

import argparse
from dataclasses import Field, fields, replace
from typing import Any, TypeVar

PlanT = TypeVar("PlanT")


def add_numbers(parser: argparse.ArgumentParser, plan: type[Any]) -> None:
    """One option for each field of the dataclass `plan` that is an int or a float."""
    for number in _numbers(plan):
        flag = f"--{number.name.replace('_', '-')}"
        parser.add_argument(flag, type=number.type, help=f"instead of the plan's (full: {number.default:g})")


def with_numbers(plan: PlanT, arguments: argparse.Namespace) -> PlanT:
    """The plan with those that were given."""
    given = {number.name: getattr(arguments, number.name) for number in _numbers(type(plan))}
    return replace(plan, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


def _numbers(plan: type[Any]) -> list[Field[Any]]:
    return [field for field in fields(plan) if field.type in {int, float}]
