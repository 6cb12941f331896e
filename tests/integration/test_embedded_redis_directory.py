"""One data directory, one server: whatever the clock, a copy of the directory or a missing place for the socket say."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import deploy.embedded_redis
import deploy.redis_wire
from deploy.embedded_redis import EmbeddedRedis
from deploy.redis_address import socket_path
from deploy.redis_wire import ask, connect
from deploy.running_lock import RunningLock
from rollout.errors import StoreUnavailable


def servers(directory: Path) -> list[int]:
    """Every redis-server whose data is there."""
    found = []
    for process in psutil.process_iter():
        try:
            if "redis-server" in process.name() and Path(process.cwd()) == directory.resolve():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def said(server: EmbeddedRedis, command: str) -> str:
    with connect(server.url.removeprefix("unix://")) as client:
        return ask(client, command)


def rewritten(directory: Path, **changes: object) -> None:
    file = directory / "server.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "data") as server:
        yield server


def test_a_step_of_the_wall_clock_starts_no_second_server(
    running: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts the start of a process from boot, so what a clock says of it moves with every step."""
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started(self) + 5)
    with EmbeddedRedis(running.directory) as second:
        assert second.pid == running.pid
        assert servers(running.directory) == [running.pid]


def test_a_server_whose_pid_means_nothing_here_is_joined(running: EmbeddedRedis) -> None:
    """As in a second container on the same directory."""
    pid = running.pid
    rewritten(running.directory, pid=2**22 + 1)
    with EmbeddedRedis(running.directory) as second:
        assert second.url == running.url
        assert servers(running.directory) == [pid]


def test_only_the_server_holds_the_running_lock(running: EmbeddedRedis) -> None:
    children = [subprocess.Popen(["sleep", "60"], close_fds=False) for _ in range(2)]
    try:
        assert RunningLock(running.directory / "running.lock").holders() == [running.pid]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_the_lock_ends_with_the_server_however_it_ends(running: EmbeddedRedis) -> None:
    assert running.is_running
    process = psutil.Process(running.pid)
    process.kill()
    process.wait(timeout=10)
    assert not running.is_running
    running.start()
    assert servers(running.directory) == [running.pid]


@contextmanager
def a_holder(lock: Path) -> Iterator[int]:
    """A process that holds the lock as a server would."""
    script = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_cannot_be_reached_is_named_and_no_second_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.embedded_redis, "_STOP_S", 0.2)
    (tmp_path / "running.lock").touch()
    with (
        a_holder(tmp_path / "running.lock") as pid,
        pytest.raises(StoreUnavailable, match=rf"process {pid}\) uses {tmp_path}.*set redis\.dir"),
    ):
        EmbeddedRedis(tmp_path).start()
    assert servers(tmp_path) == []


def test_who_looks_whether_a_server_runs_does_not_keep_one_from_starting(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom deploy.running_lock import RunningLock\n"
        "lock = RunningLock(Path(sys.argv[1]))\nprint('looking', flush=True)\nwhile True: lock.is_held"
    )
    lock = tmp_path / "running.lock"
    lock.touch()
    process = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(3):
            with EmbeddedRedis(tmp_path) as server:
                assert said(server, "PING") == "PONG"
    finally:
        process.kill()
        process.communicate()


def test_a_copy_of_a_directory_has_a_server_of_its_own(running: EmbeddedRedis, tmp_path: Path) -> None:
    said(running, "SET who original")
    shutil.copytree(running.directory, tmp_path / "copy")
    with EmbeddedRedis(tmp_path / "copy") as copy:
        assert copy.pid != running.pid
        assert copy.url != running.url
        assert said(copy, "GET who") == "original"
        said(copy, "SET who copy")
        assert said(running, "GET who") == "original"
    assert said(running, "PING") == "PONG"


def test_a_copy_does_not_take_the_address_of_a_stopped_original(tmp_path: Path) -> None:
    original, copy = EmbeddedRedis(tmp_path / "original"), EmbeddedRedis(tmp_path / "copy")
    with original:
        url = original.url
    shutil.copytree(original.directory, copy.directory)
    with copy, original:
        assert original.url == url
        assert copy.url != url
        assert servers(original.directory) == [original.pid]
        assert servers(copy.directory) == [copy.pid]


@pytest.mark.parametrize("former", ["/proc/scratch/job1/s", "/dev/null/s"])
def test_a_former_place_of_the_socket_that_cannot_be_had_again_is_replaced(tmp_path: Path, former: str) -> None:
    with EmbeddedRedis(tmp_path):
        pass
    rewritten(tmp_path, socket=former)
    for _ in range(2):
        with EmbeddedRedis(tmp_path) as server:
            assert server.url != f"unix://{former}"
            assert said(server, "PING") == "PONG"


def test_a_former_place_that_others_can_change_or_lead_elsewhere_is_left_alone(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir(mode=0o700)
    assert socket_path(str(own / "s")) == str(own / "s")
    (own / "s").touch()
    (link := tmp_path / "link").symlink_to(own)
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o710)
    for taken in (link, shared):
        found = Path(socket_path(str(taken / "s")))
        assert found.parent not in {taken, own}
        assert found.parent.stat().st_mode & 0o777 == 0o700
        found.parent.rmdir()
    assert (own / "s").exists()


def test_no_place_for_a_socket_is_said_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(StoreUnavailable, match="Set TMPDIR"):
        EmbeddedRedis(tmp_path).start()


@pytest.mark.parametrize("name", ["server.new", "redis.log"])
def test_a_file_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    """A full disk ends the same call."""
    (tmp_path / name).symlink_to("/dev/full" if name == "server.new" else tmp_path / "absent" / "log")
    with pytest.raises(StoreUnavailable, match=r"cannot be started: .*set redis\.dir"):
        EmbeddedRedis(tmp_path).start()
    assert servers(tmp_path) == []


def test_a_hung_server_on_record_is_replaced_by_who_holds_the_lock_and_not_by_its_pid(
    running: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.embedded_redis, "_START_S", 3.0)
    monkeypatch.setattr(deploy.embedded_redis, "_STOP_S", 0.5)
    monkeypatch.setattr(deploy.redis_wire, "_ANSWER_S", 2.0)
    hung = running.pid
    os.kill(hung, signal.SIGSTOP)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        rewritten(running.directory, pid=bystander.pid)
        with EmbeddedRedis(running.directory) as second:
            assert second.pid not in {hung, bystander.pid}
            assert servers(running.directory) == [second.pid]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
