"""A long TMPDIR does not keep a local fleet from starting."""

import socket
import tempfile
from pathlib import Path

import pytest

from deploy import ray_directory
from deploy.ray_directory import MAX_ROOT_BYTES, RAY, make_ray_directory, root_for
from rollout.errors import ConfigError

SHORT, LONG = Path("/" + "x" * (MAX_ROOT_BYTES - 1)), Path("/" + "x" * MAX_ROOT_BYTES)


def test_sockets_fit_below_the_longest_root_that_is_used() -> None:
    assert root_for(SHORT) == SHORT
    assert root_for(LONG) == Path("/tmp")
    session = "session_2026-11-21_23-59-59_999999_4194304"
    assert len(str(SHORT / "ns-ray-12345678" / RAY / session / "sockets" / "plasma_store")) == 107


def test_bytes_are_counted_and_not_characters() -> None:
    assert root_for(Path("/" + "ü" * (MAX_ROOT_BYTES - 1))) == Path("/tmp")


def test_a_long_tmpdir_gives_way_to_a_directory_whose_sockets_can_be_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = make_ray_directory()
    sockets = directory / RAY / "session_2026-11-21_23-59-59_999999_4194304" / "sockets"
    sockets.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as plasma:
        plasma.bind(str(sockets / "plasma_store"))
    (sockets / "plasma_store").unlink()
    for made in (sockets, sockets.parent, sockets.parents[1], directory):
        made.rmdir()


def test_where_no_directory_can_be_made_tmpdir_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(LONG))
    monkeypatch.setattr(ray_directory, "_SHORT", tmp_path / "missing")
    with pytest.raises(ConfigError, match=rf"TMPDIR={LONG}.*at most {MAX_ROOT_BYTES} bytes"):
        make_ray_directory()
