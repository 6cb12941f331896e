"""Figures of users alone: one at a time, and at the rates that the capacity search tries."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .answers import Answer
from .host import Host
from .measure import latencies
from .slo import CapacitySearch


def idle_figures(answers: Sequence[Answer], host: Host) -> dict[str, Any]:
    """Of users one at a time, and what the machine was then."""
    ttft, tpot = [a.ttft_s for a in answers], [a.tpot_s for a in answers]
    return {"ttft_s": latencies(ttft), "tpot_s": latencies(tpot), "all_ttft_s": ttft, "host": asdict(host)}


def idle_again(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The end of a run beside its beginning: how much longer the same took, by medians. None where one has none."""
    ratios = {f"{name}_ratio": _ratio(after[f"{name}_s"]["p50"], before[f"{name}_s"]["p50"]) for name in _FELT}
    return {**{name: after[name] for name in ("ttft_s", "tpot_s", "host")}, **ratios}


def capacity_figures(search: CapacitySearch, rate: float, share: float, host: Host) -> dict[str, Any]:
    """Of one probe, which `search` asked for."""
    return {
        "rate": rate,
        "attainment": share,
        "confirms": search.confirming,
        "again": search.doubted is not None,
        "host": asdict(host),
    }


_FELT = ("ttft", "tpot")


def _ratio(after: float | None, before: float | None) -> float | None:
    return after / before if after is not None and before else None
