"""What became of every version at every replica, over all sessions of a run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.board import AppliedPush, PushPath

Key = tuple[int, str]
"""Version and replica."""


def applied_pushes(records: Sequence[Mapping[str, Any]], seen: Mapping[Key, AppliedPush]) -> dict[Key, AppliedPush]:
    """The trainer's records (pushes.jsonl, all sessions) united with what was seen on the board in this one.

    A replica may take a version after the push's deadline, which only the board shows; its newest report counts.
    """
    applied = {
        (int(record["version"]), replica): AppliedPush(**{**report, "path": PushPath(report["path"])})
        for record in records
        for replica, report in record["replicas"].items()
    }
    for key, push in seen.items():
        if key not in applied or push.applied_at >= applied[key].applied_at:
            applied[key] = push
    return applied


def push_facts(applied: Mapping[Key, AppliedPush], *, collective: bool) -> dict[str, Any]:
    """For the report; `collective` is whether the trainer offers versions by a collective at all."""
    pushes = list(applied.values())
    by_path = {path.value: sum(push.path is path for push in pushes) for path in PushPath}
    return {
        "push_pause_s_largest": _largest(push.pause_s for push in pushes),
        "push_path": by_path,
        "collective_share": by_path[PushPath.COLLECTIVE] / max(len(pushes), 1) if collective else None,
        "verified_versions": len({version for (version, _), push in applied.items() if push.verified}),
        "largest_canary_gap": _largest(push.canary_gap for push in pushes),
        "unverified_pushes": sum(not push.verified for push in pushes),
    }


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)
