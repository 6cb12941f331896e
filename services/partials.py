"""Arithmetic on what there is of a sample: joining two stretches, and which salvage is worth going on from."""

from collections.abc import Mapping
from dataclasses import replace

from rollout.queue import Lease
from rollout.types import Partial, VersionSpan


def joined(before: Partial | None, after: Partial | None) -> Partial | None:
    """`after` continues `before`; either may be None, of no token. Spans of one version that meet become one."""
    if before is None or after is None:
        return after or before
    size = len(before.token_ids)
    spans = list(before.version_spans)
    for span in after.version_spans:
        moved = VersionSpan(span.version, span.start + size, span.stop + size)
        if spans[-1].version == moved.version:
            moved = replace(moved, start=spans.pop().start)
        spans.append(moved)
    return Partial(
        before.token_ids + after.token_ids, before.logprobs + after.logprobs, tuple(spans), after.finish_reason
    )


def continued(lease: Lease, *, version: int, pinned: bool) -> Mapping[int, Partial]:
    """The salvaged samples of a lease that a replica with `version` goes on from.

    Left out are those that the trainer would find too old (`lease.max_age`), and on a replica that is pinned for an
    evaluation all that another version had a part in.
    """
    kept = {}
    for index, sample in lease.salvaged.items():
        too_old = lease.max_age is not None and version - sample.oldest_version > lease.max_age
        mixed = pinned and any(span.version != version for span in sample.version_spans)
        if not too_old and not mixed:
            kept[index] = sample
    return kept
