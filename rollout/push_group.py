"""What both ends of a push epoch do alike to be one group, each with its own torch.

This package imports no torch, so where a function needs one, the end hands in `torch.distributed` or `torch.cuda`.

meet (nccl) -> form -> bucket, bucket, ... -> meet (nccl) -> close
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in the group of an epoch; plain values, so that it can go to another process.

    Example: Seat(epoch=7, rank=1, size=3, store_host="10.0.0.2", store_port=40123, op_timeout_s=10.0,
    form_timeout_s=15.0, deadline_s=60.0) is the first of two receivers.
    """

    epoch: int
    rank: int
    """0 is the trainer."""
    size: int
    store_host: str
    store_port: int
    op_timeout_s: float
    form_timeout_s: float
    deadline_s: float
    """For the member's whole part, forming included."""

    @property
    def prefix(self) -> str:
        """Of the epoch's keys in the store."""
        return f"epoch/{self.epoch}"

    @property
    def op_timeout(self) -> timedelta:
        return timedelta(seconds=self.op_timeout_s)

    @property
    def form_timeout(self) -> timedelta:
        return timedelta(seconds=self.form_timeout_s)


@dataclass(frozen=True, slots=True)
class Transport:
    """How the bytes of an epoch travel."""

    form: Callable[[Any, Seat], Any]
    """The group, out of the epoch's store and a seat. Raises RuntimeError after the seat's `form_timeout_s`."""
    device: Any = None
    """torch device of the buffer that buckets go through; None: no buffer, straight from and to the file's memory."""
    meets: bool = False
    """Members wait for each other in the store, before they form and before they leave."""
    close: Callable[[Any], None] = lambda _: None
    """Ends a group, whole or broken."""


@contextmanager
def joined(transport: Transport, store: Any, seat: Seat) -> Iterator[Any]:
    """The epoch's group; raises RuntimeError when it is not whole within the seat's `form_timeout_s`.

    NCCL has no time limit of its own for forming, so nobody begins before all are there. And nobody leaves before
    all have everything, because members forward to each other.
    """
    if transport.meets:
        _meet(store, seat, "here", seat.form_timeout_s, "push.form_timeout_s")
    group = transport.form(store, seat)
    try:
        yield group
        if transport.meets:
            # whoever is here has all bytes: a member that is lost now takes nothing away from the others
            with suppress(RuntimeError):
                _meet(store, seat, "done", seat.op_timeout_s, "push.op_timeout_s")
    finally:
        transport.close(group)


def _meet(store: Any, seat: Seat, word: str, timeout_s: float, knob: str) -> None:
    store.set(f"{word}/{seat.rank}", "")
    try:
        store.wait([f"{word}/{rank}" for rank in range(seat.size)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(
            f"not all {seat.size} members of epoch {seat.epoch} were {word} within {knob}={timeout_s} s: {error}"
        ) from error


def form_nccl(distributed: Any, device: Any, store: Any, seat: Seat) -> Any:
    """An NCCL group on `device`, whole when this returns. Raises RuntimeError when it cannot be formed."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = seat.op_timeout
    with _no_nccl_watchdog():
        group = distributed.ProcessGroupNCCL(store, seat.rank, seat.size, options)
    try:
        group.eager_connect_single_device(device)
    except RuntimeError:
        abort(group)
        raise
    return group


def abort(group: Any) -> None:
    """Ends an NCCL group without its peers; a failure to end is no news on top of what came before."""
    with suppress(RuntimeError):
        group.abort()


@contextmanager
def own_stream(cuda: Any, device: Any) -> Iterator[None]:
    """On a GPU, off the stream that its owner computes on, which must not wait for the other end of a push."""
    if device is None or device.type != "cuda":
        yield
        return
    with cuda.device(device), cuda.stream(_stream(cuda, device)):
        yield


@cache
def _stream(cuda: Any, device: Any) -> Any:
    # always the same: torch keeps freed memory for the stream it was used on
    return cuda.Stream(device)


@contextmanager
def _no_nccl_watchdog() -> Iterator[None]:
    """An NCCL group made inside reports failures to whoever waits, and to nobody else.

    By default torch watches every group from a thread that ends the process when one fails, and here the process is a
    serving engine or the trainer. Groups that exist already keep theirs: torch reads the variable as it makes a group.
    """
    with _environment:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before
