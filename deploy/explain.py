"""`nightshift explain`: what became of one rollout, from its acceptance to the step that trained it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from deploy.evidence import asked
from deploy.run_place import RunPlace
from rollout.books import OUTCOMES
from rollout.errors import NotFound
from rollout.group_record import GroupRecord
from rollout.printable import printable
from rollout.queue import group_id, place_of
from rollout.redis_books import RedisBooks
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Sample
from trainer.journal import JournalEntry, read_journal


@dataclass(frozen=True, slots=True)
class Story:
    """Of one group."""

    group_id: str
    outcome: str
    """As the server keeps it for good."""
    record: GroupRecord | None
    """None where it is no longer kept."""
    steps: tuple[str, ...]
    """What the trainer's journal says of it."""


def explain(place: RunPlace, identifier: str, *, as_json: bool) -> int:
    """Print the story of a group, or of each group of a submission. Raises NotFound."""
    journal, _ = read_journal(place.directory / "journal.jsonl")

    async def ask(store: RedisStore) -> list[Story]:
        books = RedisBooks(store, place.run)
        return [await _story(books, gid, letter, journal) for gid, letter in await _named(books, identifier)]

    stories = asked(place.redis, ask, role="explain")
    if not stories:
        raise NotFound(f"no group and no submission {identifier} in run {place.run}")
    if as_json:
        print(json.dumps([_plain(story) for story in stories]))
    else:
        print("\n\n".join("\n".join(map(printable, _lines(story))) for story in stories))
    return 0


async def _named(books: RedisBooks, identifier: str) -> list[tuple[str, str]]:
    """Groups of this name, each with the server's letter."""
    if marks := await books.submission(identifier):
        return [(group_id(identifier, i), letter) for i, letter in enumerate(marks)]
    place = place_of(identifier)
    if place is None:
        return []
    sid, index = place
    marks = await books.submission(sid)
    return [(identifier, marks[index])] if index < len(marks) else []


async def _story(books: RedisBooks, gid: str, letter: str, journal: list[JournalEntry]) -> Story:
    record = await books.record(gid)
    outcome = OUTCOMES.get(letter)
    now = outcome.value if outcome else record.state.value if record else "open, and its record is gone"
    return Story(gid, now, record, tuple(_steps(gid, journal)))


def _steps(gid: str, journal: list[JournalEntry]) -> Iterator[str]:
    for step, entry in sorted({entry.step: entry for entry in journal}.items()):
        if gid in entry.group_ids:
            place = entry.group_ids.index(gid) + 1
            yield f"in the batch of step {step}, {place} of {len(entry.group_ids)}, judged at version {entry.version}"
        dropped = {"stale": entry.stale_ids, "not trainable": entry.dead_ids, "filtered": entry.filtered_ids}
        for why, ids in dropped.items():
            if gid in ids:
                yield f"dropped while the batch of step {step} was collected: {why}"


def _lines(story: Story) -> Iterator[str]:
    record = story.record
    yield f"group {story.group_id}: {story.outcome}{_because(record)}"
    if record is None:
        yield "  the server keeps its record no longer (gateway.limits.retain_s)"
    else:
        yield from (f"  {line}" for line in _record_lines(record))
    yield from (f"  {step}" for step in story.steps or ("not in the trainer's journal",))


def _because(record: GroupRecord | None) -> str:
    return "" if record is None or record.reason is None else f" ({record.reason})"


def _record_lines(record: GroupRecord) -> Iterator[str]:
    yield f"purpose {record.purpose}, attempt {record.attempt}, {record.failures} failures"
    if record.request is not None:
        reward = record.request.reward.name if record.request.reward else "none"
        yield (
            f"{record.request.n} samples of {len(record.request.prompt_ids)} prompt tokens, at most"
            f" {record.request.sampling.max_tokens} each; reward {reward}; tenant {record.request.tenant}"
        )
    yield from (f"{_time(event.at_ms)} {event.text}" for event in record.events)
    if record.state is GroupState.LEASED and record.deadline_ms is not None:
        yield f"{_time(record.deadline_ms)} the lease of {record.consumer} ends, unless it is renewed"
    if record.state is GroupState.QUEUED and record.expires_ms is not None:
        yield f"{_time(record.expires_ms)} it is dead, unless it is leased before"
    for index, kept in sorted(record.salvaged.items()):
        versions = sorted({span.version for span in kept.part.version_spans})
        yield f"sample {index}: {len(kept.part.token_ids)} tokens salvaged, of {_versions(versions)}"
    if record.group is not None:
        group, spent = record.group, record.group.timings
        yield f"generated by {group.replica} in {spent.generated_s:.2f} s, scored in {spent.rewarded_s:.2f} s"
        for index, (sample, value) in enumerate(zip(group.samples_G, group.rewards_G, strict=True)):
            yield f"sample {index}: {_sample(sample)}, reward {value:g}"


def _sample(sample: Sample) -> str:
    spans = [span for segment in sample.segments for span in segment.version_spans]
    parts = ", ".join(f"{span.stop - span.start} of version {span.version}" for span in spans)
    ended = sample.segments[-1].finish_reason
    return f"{sample.num_response_tokens} tokens ({parts}), ended by {ended}"


def _versions(versions: list[int]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def _plain(story: Story) -> dict[str, Any]:
    """For JSON: samples by their lengths, versions and rewards, not by their tokens."""
    record = story.record
    plain: dict[str, Any] = {"group": story.group_id, "outcome": story.outcome, "steps": list(story.steps)}
    if record is None:
        return plain
    plain |= {
        "purpose": record.purpose,
        "attempt": record.attempt,
        "failures": record.failures,
        "reason": record.reason,
        "events": [asdict(event) for event in record.events],
        "salvaged": {index: len(kept.part.token_ids) for index, kept in record.salvaged.items()},
    }
    if record.group is not None:
        plain["samples"] = [
            {
                "tokens": sample.num_response_tokens,
                "versions": [asdict(span) for segment in sample.segments for span in segment.version_spans],
                "finish_reason": sample.segments[-1].finish_reason,
                "reward": reward,
            }
            for sample, reward in zip(record.group.samples_G, record.group.rewards_G, strict=True)
        ]
    return plain
