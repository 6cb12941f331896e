"""Seats of one engine: how many rollouts may hold, and who gets the next one."""

import asyncio
from collections import deque


def rollout_seats(total: int, reserve: int, users: int) -> int:
    """Seats that rollouts may hold together: what users neither use nor have reserved.

    >>> rollout_seats(64, 4, 0), rollout_seats(64, 4, 10), rollout_seats(64, 4, 80)
    (60, 54, 0)
    """
    return max(0, total - max(reserve, users))


Ticket = asyncio.Future[None]
"""One sample's place in the line, then its seat."""


class Seats:
    """First come, first served, one seat a sample.

    A sample holds one seat and waits for none while it does, so a group larger than all seats runs in waves and cannot
    lock up. Fewer seats than held means only that nobody is seated until enough are given back.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seated: set[Ticket] = set()
        self._waiting: deque[Ticket] = deque()
        self._changed = asyncio.Event()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def held(self) -> int:
        return len(self._seated)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Seats that a new sample would get at once."""
        return max(0, self._capacity - self.held - self.waiting)

    def resize(self, capacity: int) -> None:
        """Takes effect at once for those who wait, and for holders when they leave."""
        self._capacity = capacity
        self._seat()

    def ask(self) -> Ticket:
        """A place in the line, done when it has become a seat; give it to `leave` in the end, seated or not."""
        ticket: Ticket = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._seat()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the seat or the place in the line back; a second time does nothing."""
        if ticket in self._seated:
            self._seated.remove(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            ticket.cancel()
        self._seat()

    async def wait_free(self) -> None:
        """Returns when a new sample would get a seat at once."""
        while not self.free:
            self._changed.clear()
            await self._changed.wait()

    def _seat(self) -> None:
        while self._waiting and self.held < self._capacity:
            ticket = self._waiting.popleft()
            if not ticket.done():
                self._seated.add(ticket)
                ticket.set_result(None)
        if self.free:
            self._changed.set()
