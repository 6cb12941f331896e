"""A recording gives back what was put in, survives what crashes leave behind, and refuses what it cannot vouch for."""

import struct
from pathlib import Path

import pytest

from rollout.codec import encode_group, encode_request
from rollout.errors import ConfigError, RecordingError
from rollout.recording import RecordedGroup, Recording, RecordingWriter
from tests.queue_records import a_group, a_request


def a_record(number: int) -> RecordedGroup:
    group = a_group(2 + number % 3, version=number)
    return RecordedGroup(f"s-{number}", (1000 + number, number), encode_request(a_request(number)), encode_group(group))


def written(path: Path, *numbers: int) -> Path:
    with RecordingWriter(path, run="mine") as file:
        file.append([a_record(number) for number in numbers])
    return path


def read(path: Path) -> list[str]:
    recording = Recording(path)
    try:
        return [recording.experience(i).group_id for i in range(len(recording))]
    finally:
        recording.close()


def test_groups_come_back_in_order_with_their_requests(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path / "mine.rec", 1, 2, 3))
    assert recording.name.run == "mine"
    for index, number in enumerate((1, 2, 3)):
        found, expected = recording.experience(index), a_record(number).experience()
        assert (found.group_id, found.request) == (expected.group_id, expected.request)
        assert encode_group(found.group) == a_record(number).group
    recording.close()


def test_a_recording_is_continued_under_its_id(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.rec", 1, 2)
    first = Recording(path).name
    with RecordingWriter(path, run="mine") as file:
        assert (file.groups, file.last) == (2, (1002, 2))
        file.append([a_record(3)])
    assert Recording(path).name == first
    assert read(path) == ["s-1", "s-2", "s-3"]


def test_every_torn_tail_is_ignored_by_readers_and_cut_before_more_is_appended(tmp_path: Path) -> None:
    whole = written(tmp_path / "mine.rec", 1, 2).read_bytes()
    start = len(written(tmp_path / "one.rec", 1).read_bytes())
    for end in {*range(start + 1, start + 40), *range(start, len(whole), 97), len(whole) - 1}:
        path = tmp_path / "torn.rec"
        path.write_bytes(whole[:end])
        assert read(path) == ["s-1"]
        assert Recording(path).torn_bytes == end - start
        with RecordingWriter(path, run="mine") as file:
            assert file.torn_bytes == end - start
            file.append([a_record(3)])
        assert read(path) == ["s-1", "s-3"]


@pytest.mark.parametrize("zeros", [3, 8, 5000])
def test_zeros_that_a_power_cut_left_are_a_torn_tail(tmp_path: Path, zeros: int) -> None:
    path = written(tmp_path / "mine.rec", 1)
    path.write_bytes(path.read_bytes() + bytes(zeros))
    assert read(path) == ["s-1"]
    with RecordingWriter(path, run="mine") as file:
        assert file.torn_bytes == zeros


def test_a_file_torn_within_its_first_frame_begins_anew(tmp_path: Path) -> None:
    whole = written(tmp_path / "mine.rec").read_bytes()
    for end in range(len(whole)):
        path = tmp_path / "torn.rec"
        path.write_bytes(whole[:end])
        with pytest.raises(RecordingError, match="holds no recording yet"):
            Recording(path)
        written(path, 1)
        assert read(path) == ["s-1"]


def test_damage_before_the_end_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.rec", 1)
    first = len(path.read_bytes())
    written(path, 2, 3)
    good = path.read_bytes()
    for position in (first, first + 4, first + 60):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(RecordingError, match=f"damaged at byte {first}"):
            Recording(path)
        with pytest.raises(RecordingError, match=f"damaged at byte {first}"):
            RecordingWriter(path, run="mine")


def test_a_size_that_points_beyond_the_end_is_damage_and_no_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.rec", 1)
    first = len(path.read_bytes())
    written(path, 2, 3)
    good = path.read_bytes()
    path.write_bytes(good[:first] + struct.pack("<I", 1 << 30) + good[first + 4 :])
    with pytest.raises(RecordingError, match="size of an entry does not match"):
        Recording(path)


def test_a_file_of_another_kind_or_run_is_left_as_it_is(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("shopping list\n" * 10)
    with pytest.raises(RecordingError, match="not a recording"):
        RecordingWriter(foreign, run="mine")
    assert foreign.read_text() == "shopping list\n" * 10
    path = written(tmp_path / "mine.rec", 1)
    with pytest.raises(ConfigError, match="recording of run 'mine', not of 'yours'"):
        RecordingWriter(path, run="yours")
    assert read(path) == ["s-1"]


def test_two_recorders_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.rec"
    with RecordingWriter(path, run="mine"), pytest.raises(ConfigError, match="another recorder"):
        RecordingWriter(path, run="mine")


def test_a_group_out_of_order_is_refused(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "mine.rec", run="mine") as file:
        file.append([a_record(2)])
        with pytest.raises(ValueError, match="not beyond"):
            file.append([a_record(1)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"absent\.rec: cannot be read"):
        Recording(tmp_path / "absent.rec")
