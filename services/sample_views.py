"""Group records as the rollout API shows them. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rollout.queue import GroupStatus
from rollout.types import TERMINAL_STATES, Group, GroupState, Segment
from services.schemas import GroupView, SampleView, SegmentView, VersionSpanView

EXPIRED = "expired"
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def is_finished(status: GroupStatus | None) -> bool:
    """It has its samples or its end, or is not kept any more."""
    return status is None or status.state is GroupState.EXPERIENCE or status.state in TERMINAL_STATES


def counts(statuses: Sequence[GroupStatus | None]) -> dict[str, int]:
    """Groups by state, absent states left out."""
    return dict(Counter(EXPIRED if s is None else s.state.value for s in statuses))


def group_view(group_id: str, index: int, status: GroupStatus | None) -> GroupView:
    return GroupView(
        group_id=group_id,
        index=index,
        state=EXPIRED if status is None else status.state.value,
        attempt=status.attempt if status else 0,
        reason=status.reason if status else "kept for retain_s after its end",
    )


def samples_json(status: GroupStatus | None) -> str:
    """A JSON array of SampleView.

    Built sample by sample: one call over a large group would hold the interpreter for tens of milliseconds, in
    whichever thread it ran.
    """
    group = status.group if status else None
    return f"[{','.join(_one_line(view.model_dump_json()) for view in _samples(group))}]" if group else "[]"


def tokens_of(status: GroupStatus | None) -> int:
    """Response tokens of all its samples."""
    group = status.group if status else None
    return sum(len(s.response_ids_T) for sample in group.samples_G for s in sample.segments) if group else 0


def group_json(group_id: str, index: int, status: GroupStatus | None) -> str:
    """A JSON object: GroupSamples."""
    return f'{group_view(group_id, index, status).model_dump_json()[:-1]},"samples":{samples_json(status)}}}'


def _one_line(text: str) -> str:
    """JSON without the characters that many line readers take for an end of line; they only occur inside strings."""
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return text


def _samples(group: Group) -> Iterator[SampleView]:
    scored = zip(group.samples_G, group.rewards_G, group.breakdown_G, strict=True)
    for i, (sample, reward, breakdown) in enumerate(scored):
        yield SampleView(
            index=i,
            text=sample.text,
            reward=reward,
            breakdown=dict(breakdown),
            segments=[_segment(segment) for segment in sample.segments],
        )


def _segment(segment: Segment) -> SegmentView:
    return SegmentView(
        prompt_ids=segment.prompt_ids_P.tolist(),
        response_ids=segment.response_ids_T.tolist(),
        behavior_logprobs=segment.behavior_logprobs_T.tolist(),
        version_spans=[VersionSpanView(version=s.version, start=s.start, stop=s.stop) for s in segment.version_spans],
        finish_reason=segment.finish_reason.value,
    )
