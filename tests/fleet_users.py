"""Users of a running fleet: some ask for the same thing again and again, others read one long answer while something
happens to the replica that they have it from.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from rollout.board import Board
from rollout.text_lines import text_lines
from tests.plain_http import DIRECT
from tests.running_fleet import START_S, RunningFleet

LONGEST = 6000
"""Tokens of an answer that lasts for ten seconds at least; what the limit on answers has to be for it."""
_PAUSE_S = 0.1
"""Of a user, so that one replica is enough for all of them."""
_TIMEOUT_S = 120.0
_SEEN_S = 20.0
"""In which a user's answer is to be seen in a heartbeat."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are monotonic seconds."""

    begun: float
    ended: float
    status: int
    """200 where it came whole, 0 where none came."""


@dataclass
class User:
    """Asks for the same thing again and again."""

    fleet: RunningFleet
    model: str
    pause_s: float
    tokens: int
    since: threading.Event
    """Asks nothing before it is set."""
    over: threading.Event = field(default_factory=threading.Event)
    answers: list[Answer] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    """All that it was answered, at temperature 0."""

    def run(self) -> None:
        self.since.wait()
        while not self.over.is_set():
            begun = time.monotonic()
            status = self._ask()
            self.answers.append(Answer(begun, time.monotonic(), status))
            self.over.wait(self.pause_s)

    def _ask(self) -> int:
        body = {**_body(self.model, self.tokens), "temperature": 0}
        try:
            response = httpx.post(**_request(self.fleet, body))
        except httpx.HTTPError:
            return 0
        if response.status_code == 200:
            self.texts.add(response.json()["choices"][0]["text"])
        return response.status_code


@dataclass
class Reader:
    """Reads one answer of `LONGEST` tokens as it comes, to its end or until it has seen enough."""

    fleet: RunningFleet = field(repr=False)
    model: str
    begun: float = 0.0
    ended: float = 0.0
    """0 while it reads."""
    tokens: int = 0
    """Of the answer, once it is whole."""
    enough: threading.Event = field(default_factory=threading.Event, repr=False)
    left: bool = False
    """It had seen enough, and tokens still came."""
    lines: int = 0
    said: str = ""
    """What went wrong, as far as it was told."""

    @property
    def served(self) -> bool:
        return self.left or self.tokens == LONGEST

    def run(self) -> None:
        self.begun = time.monotonic()
        try:
            self._read()
        except (httpx.HTTPError, ValueError) as error:
            self.said = repr(error)
        finally:
            self.ended = time.monotonic()

    def _read(self) -> None:
        body = {**_body(self.model, LONGEST), "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", **_request(self.fleet, body)) as response:
            for line in text_lines(response.iter_bytes()):
                if line.startswith("data: {"):
                    self._hear(json.loads(line[6:]))
                if self.left:
                    return

    def _hear(self, chunk: dict[str, Any]) -> None:
        self.lines += 1
        if "error" in chunk:
            self.said = str(chunk["error"])
        elif usage := chunk.get("usage"):
            self.tokens = usage["completion_tokens"]
        else:
            self.left = self.enough.is_set()


@contextmanager
def users(
    fleet: RunningFleet,
    model: str,
    *,
    count: int = 2,
    pause_s: float = _PAUSE_S,
    tokens: int = 8,
    since: threading.Event | None = None,
) -> Iterator[list[User]]:
    """From the beginning, or `since` something happened."""
    if since is None:
        since = threading.Event()
        since.set()
    asking = [User(fleet, model, pause_s, tokens, since) for _ in range(count)]
    threads = _started(asking)
    try:
        yield asking
    finally:
        for user in asking:
            user.over.set()
        since.set()
        for thread in threads:
            thread.join(_TIMEOUT_S)


class Readers:
    """As many as were needed for each of some replicas to answer one."""

    def __init__(self, fleet: RunningFleet, model: str, board: Board) -> None:
        self._fleet, self._model, self._board = fleet, model, board
        self._threads: list[threading.Thread] = []
        self.all: list[Reader] = []
        self.held: dict[str, int] = {}
        """How many of them each replica answers."""

    async def begin(self, replicas: Iterable[str]) -> None:
        """Until each of the replicas answers one; no other user may ask meanwhile. Those who asked before are waited
        for: a heartbeat that still counts one of them would be taken for a reader's."""
        await self._seen()
        while not all(self.held.get(replica) for replica in replicas):
            reader = Reader(self._fleet, self._model)
            self.all.append(reader)
            self._threads += _started([reader])
            await self._seen()

    async def _seen(self) -> None:
        async with asyncio.timeout(_SEEN_S):
            while True:
                assert not any(reader.ended for reader in self.all), "an answer is too short, or failed"
                self.held = {b.replica: b.seats_users for b in await self._board.replicas(self._fleet.config.fleet)}
                if sum(self.held.values()) == len(self.all):
                    return
                await asyncio.sleep(0.02)

    async def ended(self) -> None:
        for reader in self.all:
            reader.enough.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, START_S)
        assert all(reader.ended for reader in self.all)

    async def check_lost(self, victim: str, *, died: float) -> None:
        """All of them were under way at the death of the replica: those that it held have lost theirs, and to the
        others every token came, or comes still."""
        await self.ended()
        assert all(reader.begun < died < reader.ended for reader in self.all), self.all
        served = sum(reader.served for reader in self.all)
        assert (served, len(self.all) - served) == (len(self.all) - self.held[victim], self.held[victim]), self.all


def failed(asking: Iterable[User]) -> list[Answer]:
    """Of all these users."""
    return [answer for user in asking for answer in user.answers if answer.status != 200]


def count(asking: Iterable[User]) -> int:
    return sum(len(user.answers) for user in asking)


def _body(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "the quick", "max_tokens": tokens, "ignore_eos": True}


def _request(fleet: RunningFleet, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    url = f"{fleet.url}/v1/completions"
    return {"url": url, "json": body, "headers": headers, "timeout": _TIMEOUT_S, **DIRECT}


def _started(those: Sequence[User | Reader]) -> list[threading.Thread]:
    threads = [threading.Thread(target=one.run, daemon=True) for one in those]
    for thread in threads:
        thread.start()
    return threads
