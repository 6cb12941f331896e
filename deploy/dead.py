"""`nightshift dead`: groups that will not be tried again by themselves."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from deploy.evidence import asked
from deploy.run_place import RunPlace
from rollout.errors import NightshiftError, NotFound
from rollout.printable import printable
from rollout.queue import DeadLetter
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore

_MOST = 10_000
"""That the server keeps."""


def list_letters(place: RunPlace, *, count: int, as_json: bool) -> int:
    """Print them, newest first."""

    async def ask(store: RedisStore) -> list[DeadLetter]:
        return await RedisQueue(store, place.run).dead_letters(count=count)

    letters = asked(place.redis, ask, role="dead")
    if as_json:
        print(json.dumps([asdict(letter) for letter in letters]))
    elif letters:
        print("\n".join(_line(letter) for letter in letters))
    else:
        print(f"run {place.run} has no dead letters")
    return 0


def retry(place: RunPlace, names: Sequence[str], *, every: bool) -> int:
    """Have groups wait again; 1 where one could not. Raises NotFound where there is none to retry."""

    async def ask(store: RedisStore) -> list[str]:
        queue = RedisQueue(store, place.run)
        refusals = []
        for name in await _chosen(queue, names, every=every):
            try:
                await queue.retry(name)
                print(f"{name} waits to be generated again", flush=True)
            except NightshiftError as error:
                refusals.append(str(error))
        return refusals

    refusals = asked(place.redis, ask, role="dead")
    for refusal in refusals:
        print(refusal)
    return 1 if refusals else 0


def drop(place: RunPlace, names: Sequence[str], *, every: bool) -> int:
    """Take letters away. Raises NotFound where there is none."""

    async def ask(store: RedisStore) -> int:
        queue = RedisQueue(store, place.run)
        return sum([await queue.drop_letters(name) for name in await _chosen(queue, names, every=every)])

    dropped = asked(place.redis, ask, role="dead")
    print(f"{dropped} dead letters dropped")
    return 0


async def _chosen(queue: RedisQueue, names: Sequence[str], *, every: bool) -> list[str]:
    known = {letter.group_id: None for letter in await queue.dead_letters(count=_MOST)}
    if every:
        return list(known)
    if missing := [name for name in names if name not in known]:
        raise NotFound(f"run {queue.run} has no dead letter of {', '.join(missing)}; see nightshift dead list")
    return list(dict.fromkeys(names))


def _line(letter: DeadLetter) -> str:
    at = datetime.fromtimestamp(letter.at_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
    return printable(f"{at} {letter.group_id} {letter.reason}")
