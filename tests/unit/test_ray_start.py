"""A machine that is slow for half a minute costs a start of Ray another try, and nothing else does."""

import ctypes
import os
import signal
import subprocess
import time

import psutil
import pytest
import ray
from ray._private import utils

from trainer.ray_start import start_local_ray

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed.")


class Init:
    """Stands for `ray.init`: leaves a process behind each time it fails."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls: list[dict[str, object]] = []

    def __call__(self, **arguments: object) -> None:
        self.calls.append(arguments)
        if self._errors:
            subprocess.Popen(["sleep", "60"])
            raise self._errors.pop(0)


def running() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE and p.name() == "sleep"]


def nothing_is_left() -> bool:
    until = time.monotonic() + 5
    while running() and time.monotonic() < until:
        time.sleep(0.01)
    return not running()


def test_a_slow_start_is_tried_again_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Init(SLOW, SLOW)
    monkeypatch.setattr(ray, "init", init)
    start_local_ray(num_cpus=2)
    assert init.calls == [{"address": "local", "num_cpus": 2}] * 3
    assert nothing_is_left()


def test_a_start_leaves_sigterm_to_whoever_handled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = signal.getsignal(signal.SIGTERM)

    def init(**_arguments: object) -> None:
        utils.set_sigterm_handler(lambda _number, _frame: None)  # as Ray's own does

    former = utils.set_sigterm_handler
    monkeypatch.setattr(ray, "init", init)
    start_local_ray()
    assert signal.getsignal(signal.SIGTERM) is kept
    assert utils.set_sigterm_handler is former


def test_a_handler_that_ray_sets_below_python_does_not_outlive_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    kept = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))

    def init(**_arguments: object) -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(signal.SIGTERM, 1)  # SIG_IGN, of which Python hears nothing

    monkeypatch.setattr(ray, "init", init)
    try:
        start_local_ray()
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, kept)


@pytest.mark.parametrize(("errors", "calls"), [((SLOW, SLOW, SLOW), 3), ((ValueError("num_cpus"),), 1)])
def test_what_no_patience_mends_is_raised(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[Exception, ...], calls: int
) -> None:
    init = Init(*errors)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(type(errors[-1]), match=str(errors[-1])[:20]):
        start_local_ray(num_cpus=2)
    assert len(init.calls) == calls
    assert nothing_is_left()
