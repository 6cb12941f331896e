"""Which server a run's queue is looked for on."""

import json
from pathlib import Path

import pytest

from deploy.run_place import RunPlace, find_run


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the directory where one is, whose config.json names a server."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"redis": {"url": "redis://127.0.0.1:1001", "namespace": "own"}}))
    return tmp_path


def found(**given: str) -> RunPlace:
    return find_run([], {"run": "mine"} | {name.replace("__", "."): value for name, value in given.items()})


def test_without_a_word_it_is_the_one_of_the_run() -> None:
    assert found().redis.url == "redis://127.0.0.1:1001"


def test_a_setting_that_names_no_server_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = found(redis__namespace="other").redis
    assert (redis.url, redis.namespace) == ("redis://127.0.0.1:1001", "other")
    monkeypatch.setenv("NIGHTSHIFT_REDIS__OUTAGE_S", "7")
    redis = found().redis
    assert (redis.url, redis.namespace, redis.outage_s) == ("redis://127.0.0.1:1001", "own", 7)


def test_a_directory_on_the_command_line_goes_before_an_address_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1002")
    assert found().redis.url == "redis://127.0.0.1:1002"
    redis = found(redis__dir="here").redis
    assert (redis.url, redis.dir) == (None, place / "here")
    assert found(redis__dir="here", redis__url="redis://127.0.0.1:1003").redis.url == "redis://127.0.0.1:1003"
