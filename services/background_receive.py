"""Receiving while the process does something else: what runs in the engine's worker, whose calls must return at once.

begin -> running -> done | failed; a new epoch takes the place of the one before, whatever became of that.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import WeightsError
from rollout.push_group import Seat, Transport
from services.background import give_way
from services.bucket_stream import receive_buckets


@dataclass(slots=True)
class Receipt:
    """How far one epoch is."""

    epoch: int
    done: bool = False
    error: str = ""
    """Why it failed."""


class BackgroundReceive:
    """The newest epoch's receiving, in a daemon thread of its own; an older thread cannot touch its receipt."""

    def __init__(self) -> None:
        self._newest = Receipt(0)

    def begin(self, seat: Seat, files: Sequence[tuple[str, int]], directory: Path, transport: Transport) -> None:
        """Start and return at once."""
        self._newest = receipt = Receipt(seat.epoch)
        work = (receipt, seat, files, directory, transport)
        threading.Thread(target=_receive, args=work, daemon=True, name=f"push-epoch-{seat.epoch}").start()

    def receipt(self, epoch: int) -> Receipt:
        """Of this epoch; failed when this process never began it."""
        if self._newest.epoch != epoch:
            return Receipt(epoch, error=f"epoch {epoch} was not begun here, the newest is {self._newest.epoch}")
        return self._newest


def _receive(
    receipt: Receipt, seat: Seat, files: Sequence[tuple[str, int]], directory: Path, transport: Transport
) -> None:
    give_way()
    try:
        receive_buckets(seat, files, directory, transport)
        receipt.done = True
    except WeightsError as error:
        receipt.error = str(error)
    except BaseException as error:
        receipt.error = f"epoch {seat.epoch}: {error!r}"
        raise
