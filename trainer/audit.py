"""Whether a run's promises hold, from what its queue's server and its directory say; pure.

Each promise that can be told from these two has one finding. Those of a moment (a push that never wedges, users first)
leave nothing behind to be judged by.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rollout.books import Books
from rollout.queue import Ledger
from rollout.types import GroupState
from trainer.journal import JournalEntry
from trainer.run_files import RunFiles

_GROWING = ("accepted", "trained", "delivered", "filtered", "stale", "cancelled")
"""Counters that no operation makes smaller."""
_ENDED = ("trained", "delivered", "filtered", "stale", "dead", "cancelled")
_UNTRAINED = frozenset({GroupState.DEAD, GroupState.STALE})
"""How a group that stands in a step may have ended otherwise: the step was skipped, it was not scored, or a repetition
found it stale."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one promise."""

    promise: str
    claim: str
    problems: tuple[str, ...]
    """Every group, step, prompt or version that contradicts it; empty where it holds."""
    figures: str
    """What was counted."""
    judged: bool = True
    """False without the server, where it takes that."""

    @property
    def held(self) -> bool:
        return not self.problems


def audit(books: Books | None, files: RunFiles) -> list[Finding]:
    """Without `books`, as of a replay, which has no server, the directory alone is judged."""
    return [
        _accepted_means_kept(books, files),
        _trained_at_most_once(books, files),
        _idempotent_submit(books),
        _exact_resume(books, files),
        _no_reused_version(books, files),
        _one_writer(books, files),
    ]


def _accepted_means_kept(books: Books | None, files: RunFiles) -> Finding:
    name, claim = "P1", "accepted means kept"
    if books is None:
        return Finding(name, claim, (), "needs the queue's server", judged=False)
    problems = [
        *_other_server(books, files),
        *_counters(books),
        *_open_groups(books),
        *_missing(books, files),
        *_shrunk(books.ledger, files),
    ]
    return Finding(name, claim, tuple(problems), _sum(books.ledger))


def _sum(ledger: Ledger) -> str:
    """The equation, without the terms that are 0."""
    counts = asdict(ledger)
    terms = [f"{counts[term]:,} {term}" for term in _ENDED if counts[term]]
    return f"{ledger.accepted:,} accepted = {' + '.join([*terms, f'{ledger.pending:,} pending'])}"


def _other_server(books: Books, files: RunFiles) -> Iterator[str]:
    if files.server is not None and books.identity != files.server:
        yield f"the run used server {files.server}, and this one is {books.identity or 'new to it'}"


def _counters(books: Books) -> Iterator[str]:
    ledger, again = asdict(books.ledger), asdict(books.recount())
    if balance := books.ledger.balance:
        yield f"the counters account for {books.ledger.accepted - balance} of {books.ledger.accepted} accepted groups"
    for term, counted in again.items():
        if ledger[term] != counted:
            yield f"the counter of {term} says {ledger[term]}, the groups themselves {counted}"


def _open_groups(books: Books) -> Iterator[str]:
    for gid, group in books.open_groups.items():
        if group.state is None:
            yield f"group {gid} has not ended, and its record is gone"
        elif not group.listed:
            yield f"group {gid} is {group.state}, and would never be handed out"


def _missing(books: Books, files: RunFiles) -> Iterator[str]:
    """What was acknowledged, as the directory knows, and is not there."""
    for step, entry in files.history.items():
        for gid in (*entry.group_ids, *entry.stale_ids, *entry.dead_ids, *entry.filtered_ids):
            if not books.known(gid):
                yield f"group {gid}, of journaled step {step}, is unknown to the server"
    yield from _missing_prompts(books, files)


def _missing_prompts(books: Books, files: RunFiles) -> Iterator[str]:
    """Blocks of the run's own prompts that were submitted before its checkpoint: see `feeder`."""
    prefix, cursor = f"feed:{books.run}:", 0
    named = (key.removeprefix(prefix) for key in books.keys if key.startswith(prefix))
    starts = sorted(int(name) for name in named if name.isascii() and name.isdigit())
    submitted = 0 if files.checkpoint is None else files.checkpoint.data_cursor
    while cursor < submitted:
        size = len(books.marks.get(books.keys.get(f"{prefix}{cursor}", ""), ""))
        if not size:
            size = min([start for start in starts if start > cursor], default=submitted) - cursor
            yield f"the run's prompts {cursor} to {cursor + size - 1} were submitted and are unknown to the server"
        cursor += size


def _shrunk(ledger: Ledger, files: RunFiles) -> Iterator[str]:
    now, then = asdict(ledger), {} if files.checkpoint is None else files.checkpoint.ledger
    for term in _GROWING:
        if now[term] < then.get(term, 0):
            yield f"the server counts {now[term]} {term}, and had {then[term]} at the checkpoint of step {files.step}"


def _trained_at_most_once(books: Books | None, files: RunFiles) -> Finding:
    problems = [*_gaps(files), *_twice(files), *(() if books is None else _settled(books, files))]
    trained = sum(len(entry.group_ids) for entry in files.history.values())
    figures = f"{len(files.history):,} steps of {trained:,} groups, up to {files.step:,} in the checkpoint"
    return Finding("P2", "trained at most once", tuple(problems), figures)


def _gaps(files: RunFiles) -> Iterator[str]:
    steps = [0, *files.history]
    for before, after in pairwise(steps):
        if after > before + 1:
            yield f"the journal has no entry of {_steps(before + 1, after - 1)}"
    if steps[-1] < files.step:
        yield f"the journal ends at step {steps[-1]}, and the checkpoint is of step {files.step}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _twice(files: RunFiles) -> Iterator[str]:
    seen: dict[str, int] = {}
    for step, entry in files.history.items():
        for gid in entry.group_ids:
            if gid in seen:
                yield f"group {gid} was trained in step {seen[gid]} and in step {step}"
            seen[gid] = step
    for step, entry in files.history.items():
        for gid in (*entry.stale_ids, *entry.dead_ids, *entry.filtered_ids):
            if gid in seen:
                yield f"group {gid} was dropped by step {step} and trained in step {seen[gid]}"


def _settled(books: Books, files: RunFiles) -> Iterator[str]:
    """A group leaves the queue as trained when a checkpoint contains its step, and not before."""
    contained = {gid: step for step, entry in files.history.items() if step <= files.step for gid in entry.group_ids}
    waiting = frozenset(() if files.checkpoint is None else files.checkpoint.settled_ids)
    for gid, step in contained.items():
        outcome = books.outcome(gid) if books.known(gid) else GroupState.TRAINED  # P1 tells of those unknown
        if outcome is None and gid not in waiting:  # those the next start ends, however far they had come
            yield f"group {gid} is in the checkpoint of step {files.step} (step {step}), and would be trained again"
        if outcome not in {GroupState.TRAINED, None, *_UNTRAINED}:
            yield f"group {gid} was trained in step {step} and ended {outcome}"
    for gid in books.ended_as(GroupState.TRAINED):
        if gid not in contained:
            yield f"group {gid} ended as trained, and no step up to the checkpoint of step {files.step} trained it"


def _idempotent_submit(books: Books | None) -> Finding:
    name, claim = "P3", "idempotent submit"
    if books is None:
        return Finding(name, claim, (), "needs the queue's server", judged=False)
    problems = [
        f"idempotency key {key!r} stands for submission {sid}, which is unknown"
        for key, sid in books.keys.items()
        if sid not in books.marks
    ]
    return Finding(name, claim, tuple(problems), f"{len(books.keys):,} keys of {len(books.marks):,} submissions")


def _exact_resume(books: Books | None, files: RunFiles) -> Finding:
    again = [entry for step, entry in files.history.items() if step > files.step]
    problems = [*files.damages, *(() if books is None else _unrepeatable(books, again))]
    found = f"checkpoint of step {files.step}" if files.checkpoint else "no checkpoint yet"
    return Finding("P4", "exact resume", tuple(problems), f"{found}, {len(again)} journaled steps to repeat")


def _unrepeatable(books: Books, entries: Iterable[JournalEntry]) -> Iterator[str]:
    for entry in entries:
        for gid in filter(books.known, entry.group_ids):
            outcome = books.outcome(gid)
            state = outcome or books.open_groups[gid].state
            # P2 tells of those that ended as trained
            if state not in {None, GroupState.EXPERIENCE, GroupState.TRAINED, *_UNTRAINED}:
                yield f"step {entry.step} cannot be repeated: its group {gid} is {state}"


def _no_reused_version(books: Books | None, files: RunFiles) -> Finding:
    problems = [*_republished(files), *_falling(entry.version for entry in files.journal)]
    if books is not None:
        problems += _beyond(books.newest_version, files)
        problems += _pointer(books, files)
    kept = [manifest.version for manifest in files.manifests]
    figures = f"{len(files.updates):,} published with steps, {len(kept)} kept"
    if books is not None:
        figures += f", {books.newest_version:,} numbers given"
    return Finding("P5", "no reused version", tuple(problems), figures)


def _republished(files: RunFiles) -> Iterator[str]:
    newest = 0
    for update in files.updates:
        if update.version <= newest:
            yield f"step {update.step} published version {update.version} after version {newest}"
        newest = max(newest, update.version)


def _falling(versions: Iterable[int]) -> Iterator[str]:
    for before, after in pairwise(versions):
        if after < before:
            yield f"the journal goes back from version {before} to {after}"


def _beyond(newest: int, files: RunFiles) -> Iterator[str]:
    known = {f"{manifest.version} that is published": manifest.version for manifest in files.manifests}
    if files.checkpoint is not None:
        known[f"{files.checkpoint.version} of the checkpoint of step {files.step}"] = files.checkpoint.version
    for name, version in known.items():
        if version > newest:
            yield f"version {name} is larger than {newest}, the newest number that the server gave"


def _pointer(books: Books, files: RunFiles) -> Iterator[str]:
    current = books.current
    if current is None or not files.manifests:
        return
    found = {manifest.version: manifest for manifest in files.manifests}.get(current.version)
    if found is None:
        yield f"weights:current names version {current.version}, which is not there"
    elif found.digest != current.digest:
        yield f"version {current.version} has digest {found.digest}, and weights:current says {current.digest}"


def _one_writer(books: Books | None, files: RunFiles) -> Finding:
    tokens = [(f"version {manifest.version}", manifest.fencing_token) for manifest in files.manifests]
    problems = list(_older_writers(tokens))
    if files.checkpoint is not None:
        tokens.append((f"the checkpoint of step {files.step}", files.checkpoint.fencing_token))
    if books is not None:
        problems += [
            f"{name} is of writer {token}, and the server knows of none after {books.writer_token}"
            for name, token in tokens
            if token > books.writer_token
        ]
    newest = max((token for _, token in tokens), default=0) if books is None else books.writer_token
    return Finding("P12", "one writer", tuple(problems), f"{newest} writers so far")


def _older_writers(tokens: Sequence[tuple[str, int]]) -> Iterator[str]:
    for (before, token), (name, after) in pairwise(tokens):
        if after < token:
            yield f"{name} is of writer {after}, and {before} of writer {token}"
