"""Replicas that share a staging directory leave each other's bytes alone."""

import os
from pathlib import Path

import pytest

from rollout.errors import ConfigError, WeightsError
from services.staging import Staging, replica_name, shared_with_others

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


def base(root: Path) -> Path:
    return root / f"nightshift-{os.getuid()}"


def refused(root: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^push\.staging_dir.*{words}"):
        Staging(root, "host-1-a").prepare()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o750])
def test_a_directory_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    base(tmp_path).mkdir()
    base(tmp_path).chmod(mode)
    refused(tmp_path, f"mode 0{mode:o}")


def test_a_link_or_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base(tmp_path).symlink_to(tmp_path / "elsewhere")
    refused(tmp_path, "no directory")
    base(tmp_path).unlink()
    base(tmp_path).touch()
    refused(tmp_path, "cannot be made")


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert shared_with_others(tmp_path.lstat(), os.getuid()) is None
    assert (
        shared_with_others(tmp_path.lstat(), os.getuid() + 1) == f"belongs to user {os.getuid()}, not {os.getuid() + 1}"
    )


@pytest.mark.parametrize("name", ["/tmp/host-1-a", "../host-1-a", "..", ""])
def test_a_copy_is_looked_for_in_no_directory_but_that_of_a_replica(tmp_path: Path, name: str) -> None:
    staging = Staging(tmp_path, "host-1-b")
    assert staging.of("host-1-a", 1, 2) == base(tmp_path) / "host-1-a" / "v00000001-e2"
    with pytest.raises(WeightsError, match="not the name of a replica"):
        staging.of(name, 1, 2)


def test_the_directory_it_makes_is_its_users_alone(tmp_path: Path) -> None:
    started(tmp_path, nonce="one")
    started(tmp_path, nonce="two")
    assert base(tmp_path).stat().st_mode & 0o777 == 0o700


def test_replicas_are_at_one_place_where_they_see_each_others_directories(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    stagings = [Staging(tmp_path / root, replica) for root, replica in (("one", "a"), ("one", "b"), ("other", "c"))]
    for staging in stagings:
        staging.prepare()
    first, second, elsewhere = (staging.place for staging in stagings)
    assert first == second != elsewhere
