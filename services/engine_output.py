"""What the engine client says of a request, as records; nothing here needs vLLM itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.types import FinishReason, Partial, VersionSpan

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class GenerationError(RuntimeError):
    """The engine ended a sample without a result (aborted, or an output that cannot be read)."""


def partial(output: Any, version: int | None) -> Partial | None:
    """A request's last output; None without a token. `version` is its adapter's. Raises GenerationError."""
    completion = output.outputs[0]
    if (reason := _FINISH.get(completion.finish_reason)) is None:
        raise GenerationError(f"sample ended with {completion.finish_reason!r}")
    if not completion.token_ids:
        return None
    flat = completion.logprobs
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)[list(flat.start_indices)].tolist()
    return part(completion.token_ids, logprobs, completion.weight_versions, version, reason)


def part(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    labels: Sequence[Any] | None,
    version: int | None,
    reason: FinishReason,
    *,
    start: int = 0,
) -> Partial:
    """Tokens from `start` on; `labels` count from the request's first. Raises GenerationError unless there are one
    logprob a token and labels over all tokens.

    The engine labels tokens with the version of its whole weights; a request on an adapter ends on it, and is all of
    the adapter's `version`.
    """
    if len(logprobs) != len(token_ids):
        raise GenerationError(f"{len(token_ids)} tokens but {len(logprobs)} logprobs")
    labels = labels or () if version is None else (_Label(version, 0, start + len(token_ids)),)
    found = tuple(
        VersionSpan(int(label.version), max(0, label.start - start), label.end - start)
        for label in labels
        if label.end > max(start, label.start)
    )
    if sum(span.stop - span.start for span in found) != len(token_ids):
        raise GenerationError(f"version spans {found} do not cover {len(token_ids)} tokens")
    return Partial(tuple(token_ids), tuple(logprobs), found, reason)


class _Label(NamedTuple):
    version: int
    start: int
    end: int
