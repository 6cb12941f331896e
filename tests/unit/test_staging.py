"""Replicas that share a staging directory leave each other's bytes alone."""

from pathlib import Path

from services.staging import Staging, replica_name

GONE_PID = 2**22 + 1
"""Above what Linux ever gives, as the number of a process in another container looks from here."""


def started(root: Path, *, host: str = "host-a", nonce: str) -> tuple[Staging, Path]:
    """A replica that has staged one version, and where."""
    staging = Staging(root, replica_name(host, GONE_PID, nonce))
    staging.prepare()
    return staging, staging.open("v00000001-e1", 1)


def test_a_living_replica_keeps_its_version_whatever_its_process_number(tmp_path: Path) -> None:
    _one, directory = started(tmp_path, nonce="one")
    started(tmp_path, nonce="two")
    assert directory.is_dir()


def test_what_a_dead_replica_of_this_host_left_is_swept(tmp_path: Path) -> None:
    _one, directory = started(tmp_path, nonce="one")
    left = directory.parent.with_name(replica_name("host-a", 1, "before"))
    left.mkdir()
    (left / "in-use").touch()
    started(tmp_path, nonce="two")
    assert not left.exists()
    assert directory.parent.is_dir()


def test_what_replicas_of_other_hosts_left_is_kept(tmp_path: Path) -> None:
    _one, directory = started(tmp_path, nonce="one")
    other = directory.parent.with_name(replica_name("host", 1, "other"))
    other.mkdir()
    started(tmp_path, nonce="two")
    assert other.is_dir()


def test_a_new_version_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    staging, first = started(tmp_path, nonce="one")
    second = staging.open("v00000002-e2", 1)
    assert (first.exists(), second.is_dir()) == (False, True)
    staging.close()
    assert not second.parent.exists()
