"""While no replica takes users: their requests wait in the gateway, and the lender calls a lent replica back at once.

a request: refused by one that had refused --> call, wait ----------------------------> ask again
lender:                                          look, recall, swap, it serves --seen--^
"""

import asyncio
from contextlib import suppress

from services.refusals import REFUSALS, Refusals

_ASK_S = 5.0
"""Between two asks while nobody is seen to serve: the view may fail, and a replica that loads weights has other work
than to refuse a crowd."""


class Recall:
    """Between the requests and the lender of one gateway, in one event loop."""

    def __init__(self, patience_s: float, refusals: Refusals = REFUSALS) -> None:
        """`patience_s` is the longest that a request waits."""
        self._patience_s = patience_s
        self._refusals = refusals
        self._called, self._serves = asyncio.Event(), asyncio.Event()
        self._hope = False

    # what requests do

    def call(self) -> None:
        """Say that no replica takes users, where the lender believes that one does."""
        if self._serves.is_set():
            self._serves.clear()
            self._called.set()

    def worth(self, waited_s: float) -> bool:
        """Whether a request that has waited for so long goes on: a replica serves users, or can come back to them."""
        return self._hope and waited_s < self._patience_s

    async def served(self, waited_s: float) -> None:
        """Returns when a replica is seen to serve, or it is time to ask anyway."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_ASK_S, self._patience_s - waited_s)):
                await self._serves.wait()

    # what the lender does

    async def called(self, within_s: float) -> None:
        """Returns when a request has called, or so many seconds later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._called.wait()

    def take(self) -> bool:
        """Whether a request has called since it was asked before."""
        called = self._called.is_set()
        self._called.clear()
        return called

    def seen(self, *, serves: bool, returns: bool) -> None:
        """Whether any replica serves users, and whether any can come back to them."""
        self._hope = serves or returns
        if not serves:
            self._serves.clear()
        elif not self._serves.is_set():
            self._refusals.clear()  # the one that serves now has refused, too
            self._serves.set()
