from pathlib import Path

import pytest

from deploy.memory import available_bytes, cgroup_room

GIB = 1024**3


def a_group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content + "\n")


def room(tmp_path: Path, cgroup: str) -> int | None:
    (tmp_path / "cgroup").write_text(cgroup)
    return cgroup_room(tmp_path / "cgroup", tmp_path)


def test_a_limit_leaves_what_is_not_used_yet(tmp_path: Path) -> None:
    a_group(tmp_path / "job", memory__max=str(4 * GIB), memory__current=str(3 * GIB))
    assert room(tmp_path, "0::/job\n") == GIB


def test_the_tightest_limit_around_the_process_counts(tmp_path: Path) -> None:
    a_group(tmp_path / "slice", memory__max=str(2 * GIB), memory__current=str(GIB))
    a_group(tmp_path / "slice" / "job", memory__max="max", memory__current="5")
    assert room(tmp_path, "0::/slice/job\n") == GIB


def test_the_older_version_is_read_too(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": str(3 * GIB), "memory__usage_in_bytes": str(GIB)}
    a_group(tmp_path / "memory" / "job", **files)
    a_group(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="9")
    assert room(tmp_path, "5:cpu:/\n4:hugetlb,memory:/job\n0::/\n") == 2 * GIB


def test_in_a_container_the_path_of_the_host_is_not_there_and_the_mount_is_the_limit(tmp_path: Path) -> None:
    a_group(tmp_path, memory__max=str(2 * GIB), memory__current=str(GIB))
    assert room(tmp_path, "0::/docker/4f1\n") == GIB
    assert room(tmp_path, "0::/../../job\n") == GIB


def test_cached_files_that_can_be_given_up_are_not_used(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}\nactive_file 7"
    a_group(tmp_path, memory__max=str(2 * GIB), memory__current=str(2 * GIB), memory__stat=stat)
    assert room(tmp_path, "0::/\n") == GIB


def test_a_group_above_its_limit_has_no_room(tmp_path: Path) -> None:
    a_group(tmp_path, memory__max="1000", memory__current="2000")
    assert room(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "4:memory:/job\n0::/\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, cgroup: str) -> None:
    assert room(tmp_path, cgroup) is None
    assert cgroup_room(tmp_path / "absent", tmp_path) is None


def test_something_is_available_here() -> None:
    assert available_bytes() > 0
