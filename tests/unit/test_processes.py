"""A stop waits for what must not be cut in two, once; and what is left of a command that was killed is ended."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.processes import Guardian, Tree, interrupt_deferred


class Stopped(Exception):
    """Raised by the command's own handler."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Of SIGTERM, as a command sets its own; SIGINT keeps Python's."""

    def stop(_number: int, _frame: object) -> None:
        raise Stopped

    former = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)])
def test_a_stop_takes_effect_when_the_block_is_done(number: signal.Signals, error: type[BaseException]) -> None:
    done = False
    with pytest.raises(error), interrupt_deferred():  # noqa: PT012 - what is after the signal is the point
        signal.raise_signal(number)
        done = True
    assert done


def test_a_second_stop_takes_effect_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupt_deferred():  # noqa: PT012 - as above
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second stop was deferred, too")


def test_handlers_are_put_back_whatever_the_block_sets() -> None:
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with interrupt_deferred():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert {number: signal.getsignal(number) for number in former} == former


def test_an_error_of_the_block_is_what_is_raised() -> None:
    with pytest.raises(ValueError, match="first"), interrupt_deferred():  # noqa: PT012 - as above
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")


def test_threads_other_than_the_main_one_just_run_the_block() -> None:
    ran = []

    def work() -> None:
        with interrupt_deferred():
            ran.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [1]


def test_the_guardian_is_ours_where_the_current_directory_has_a_module_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy").mkdir()
    for name in ("__init__.py", "guardian.py"):
        (tmp_path / "deploy" / name).touch()
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "left"
    left.mkdir()
    Guardian(Tree(), redis_dir=None, remove=[left]).dismiss()
    assert not left.exists()
