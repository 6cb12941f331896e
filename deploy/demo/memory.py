"""Memory of everything the demo started: the sum of PSS over its processes, sampled in a thread."""

import threading
from collections.abc import Callable, Iterable

import psutil

_GIB = float(1 << 30)


def total_pss(processes: Iterable[psutil.Process]) -> int:
    """Bytes of PSS: pages that several processes share count once over all of them."""
    return sum(_pss(process) for process in processes)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


class PeakMemory:
    """Samples until stopped and keeps the peak; this process counts as well.

    The kernel walks the page tables of a process to tell its PSS, which holds that process up: hence the interval.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]], *, interval_s: float = 5.0) -> None:
        self.peak_bytes = 0
        self._processes, self._interval_s = processes, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / _GIB

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, total_pss([psutil.Process(), *self._processes()]))
