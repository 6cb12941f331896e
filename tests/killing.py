"""Ends something at a named moment of its work, see `rollout.milestone`."""

from collections.abc import Callable
from enum import StrEnum


def kill_at(milestone: StrEnum, count: int, end: Callable[[], None]) -> Callable[[StrEnum], None]:
    """An observer that calls `end` when the milestone is passed for the `count`th time."""
    passed = 0

    def observe(reached: StrEnum) -> None:
        nonlocal passed
        passed += reached is milestone
        if reached is milestone and passed == count:
            end()

    return observe
