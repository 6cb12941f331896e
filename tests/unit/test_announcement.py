"""What a local fleet tells other commands, and when it is believed."""

import errno
import fcntl
import json
import os
import re
import threading
from pathlib import Path

import pytest

from deploy.announcement import announce, announcement_file, only_one, running_fleet, running_fleets
from rollout.errors import ConfigError

CONTENT = {"pid": os.getpid(), "url": "http://127.0.0.1:8000"}


def test_a_fleet_is_found_as_long_as_it_has_its_lock(tmp_path: Path) -> None:
    with only_one(tmp_path, "mine"):
        announce(tmp_path, "mine", CONTENT)
        assert running_fleet(tmp_path, "mine") == CONTENT
        assert list(running_fleets(tmp_path)) == [("mine", CONTENT)]
    assert announcement_file(tmp_path, "mine").exists()  # as after a kill, and its pid is a process's
    assert running_fleet(tmp_path, "mine") is None
    assert list(running_fleets(tmp_path)) == []


def test_what_is_no_announcement_is_no_fleet(tmp_path: Path) -> None:
    assert running_fleet(tmp_path / "nowhere", "mine") is None
    with only_one(tmp_path, "mine"):
        assert running_fleet(tmp_path, "mine") is None
        for text in ("", "[]", "{"):
            announcement_file(tmp_path, "mine").write_text(text)
            assert running_fleet(tmp_path, "mine") is None


def test_a_fleet_may_have_the_name_of_any_other_file_there(tmp_path: Path) -> None:
    kept = tmp_path / "tokens.json"
    kept.write_text(json.dumps({"user": "kept"}))
    with only_one(tmp_path, "tokens"):
        announce(tmp_path, "tokens", CONTENT)
        assert json.loads(kept.read_text()) == {"user": "kept"}
        assert running_fleet(tmp_path, "tokens") == CONTENT


def test_a_second_fleet_of_the_name_is_refused_with_where_the_first_is(tmp_path: Path) -> None:
    with only_one(tmp_path, "mine"):
        with pytest.raises(ConfigError, match=r"fleet_name=mine: a local fleet of this name already runs\. Stop it"):
            only_one(tmp_path, "mine")
        announce(tmp_path, "mine", CONTENT)
        with pytest.raises(ConfigError, match=rf"runs \(pid {os.getpid()}, http://127.0.0.1:8000\)"):
            only_one(tmp_path, "mine")
        with only_one(tmp_path, "another"):
            assert running_fleet(tmp_path, "mine") == CONTENT


def test_a_filesystem_without_locks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=rf"state_dir={re.escape(str(tmp_path))}: files there cannot be locked"):
        only_one(tmp_path, "mine")


def test_who_only_looks_whether_it_runs_does_not_stop_its_start(tmp_path: Path) -> None:
    with only_one(tmp_path, "mine"):
        pass
    with (tmp_path / "mine.lock").open("rb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(looks, fcntl.LOCK_UN)).start()
        with only_one(tmp_path, "mine"):
            announce(tmp_path, "mine", CONTENT)
            assert running_fleet(tmp_path, "mine") == CONTENT
