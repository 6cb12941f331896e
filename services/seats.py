"""Seats of one engine: how many rollouts may hold, who gets the next one, and who gives one up for a user."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Hashable

from rollout.board import CutCause


def rollout_seats(total: int, reserve: int, users: int) -> int:
    """Seats that rollouts may hold together: what users neither use nor have reserved.

    >>> rollout_seats(64, 4, 0), rollout_seats(64, 4, 10), rollout_seats(64, 4, 80)
    (60, 54, 0)
    """
    return max(0, total - max(reserve, users))


class Ticket:
    """One sample's place in the line, then its seat, until it is wanted back or given to `Seats.leave`."""

    __slots__ = ("born", "cause", "family", "prefill", "seated", "shared", "wanted")

    def __init__(self, born: int, prefill: int, family: Hashable, shared: int) -> None:
        loop = asyncio.get_running_loop()
        self.born = born
        """The larger, the newer is the sample; it keeps its number when it asks again."""
        self.prefill = prefill
        """Tokens that the engine computes before the sample's next one."""
        self.family = family
        """What samples of one prompt have in common."""
        self.shared = shared
        """Of `prefill`, what the engine has computed once a sample of the family has its first token."""
        self.seated: asyncio.Future[None] = loop.create_future()
        """Done when the place in the line has become a seat."""
        self.wanted: asyncio.Future[None] = loop.create_future()
        """Done when whoever has it is to leave at once."""
        self.cause: CutCause | None = None
        """Why it is wanted; None where the sample itself is to end."""

    def want(self, cause: CutCause | None = None) -> None:
        """Ask for it back; a second time does nothing."""
        if not self.wanted.done():
            self.cause = cause
            self.wanted.set_result(None)


class Seats:
    """First come, first served, one seat a sample; the newest samples leave first.

    A sample holds one seat and waits for none while it does, so a group larger than all seats runs in waves and cannot
    lock up. Fewer seats to give than held means only that nobody is seated until enough are given back; fewer seats
    than held that rollouts can have at all (`most`) means that the newest are asked to leave.

    Samples that were seated and have no token yet share `pace` tokens of prefill, since the engine steps with all of
    them at once and a user waits for the step; one alone may have more. Prefill that a seated sample of the same family
    has behind it is not counted.
    """

    def __init__(self, capacity: int, *, pace: int) -> None:
        self._capacity = capacity
        self.pace = pace
        self._seated: set[Ticket] = set()
        self._starting: set[Ticket] = set()
        self._computed: Counter[Hashable] = Counter()
        """Of each family, seated samples that have a token."""
        self._waiting: deque[Ticket] = deque()
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._numbers = itertools.count()
        self.begun = 0
        """Tokens of prefill of all that were seated, since the start."""

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def held(self) -> int:
        return len(self._seated)

    @property
    def starting(self) -> int:
        """Seats whose samples have no token yet."""
        return len(self._starting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Seats that nobody holds and nobody waits for."""
        return max(0, self._capacity - self.held - self.waiting)

    def resize(self, capacity: int, *, most: int | None = None, cause: CutCause = CutCause.USER) -> None:
        """`capacity` takes effect at once for those who wait, and for holders when they leave; those who hold seats
        beyond `most` (None: no bound) are wanted away at once for that `cause`, the newest first."""
        self._capacity = capacity
        if most is not None:
            self._want_back(max(0, most), cause)
        self._seat()

    def ask(self, *, prefill: int, again: Ticket | None = None, family: Hashable = None, shared: int = 0) -> Ticket:
        """A place in the line, whose `seated` is done when it has become a seat; give it to `leave` in the end, seated
        or not. Who gave a seat up asks with the ticket of then, `again`, and stands before all who came later. Of its
        `prefill` tokens the engine need not compute the first `shared` where one of its `family` has done so."""
        ticket = Ticket(next(self._numbers) if again is None else again.born, prefill, family, shared)
        if again is None:
            self._waiting.append(ticket)
        else:
            # all of them may have been cut at once; the oldest have the most to lose
            older = sum(1 for waiting in self._waiting if waiting.born < ticket.born)
            self._waiting.insert(older, ticket)
        self._seat()
        return ticket

    def started(self, ticket: Ticket) -> None:
        """The sample has its first token: its prefill is behind it."""
        if ticket in self._starting:
            self._starting.remove(ticket)
            self._computed[ticket.family] += 1
        self._seat()

    def leave(self, ticket: Ticket) -> None:
        """Give the seat or the place in the line back; a second time does nothing."""
        if ticket in self._starting:
            self._starting.remove(ticket)
            self._seated.remove(ticket)
        elif ticket in self._seated:
            self._seated.remove(ticket)
            self._computed -= Counter((ticket.family,))
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            ticket.seated.cancel()
        if not self._seated:
            self._empty.set()
        self._seat()

    async def wait_free(self) -> None:
        """Returns when there is a seat that nobody holds or waits for."""
        while not self.free:
            self._changed.clear()
            await self._changed.wait()

    async def wait_empty(self) -> None:
        """Returns when no sample holds a seat."""
        while self._seated:
            self._empty.clear()
            await self._empty.wait()

    def _want_back(self, most: int, cause: CutCause) -> None:
        staying = sorted((t for t in self._seated if not t.wanted.done()), key=lambda ticket: ticket.born)
        for ticket in staying[most:]:
            ticket.want(cause)

    def _seat(self) -> None:
        while self._waiting and self.held < self._capacity and self._paced(self._waiting[0]):
            ticket = self._waiting.popleft()
            if not ticket.seated.done():
                self.begun += self._fresh(ticket)
                self._seated.add(ticket)
                self._starting.add(ticket)
                ticket.seated.set_result(None)
        if self.free:
            self._changed.set()

    def _paced(self, ticket: Ticket) -> bool:
        return not self._starting or sum(map(self._fresh, self._starting)) + self._fresh(ticket) <= self.pace

    def _fresh(self, ticket: Ticket) -> int:
        """Tokens that the engine still has to compute for its first one."""
        return ticket.prefill - (ticket.shared if self._computed[ticket.family] else 0)
