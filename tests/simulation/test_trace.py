"""Traces: what is read, what is refused with its line, and the users that come of it."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulation.trace import Arrival, RatePoint, load_of, read, told_s
from deploy.simulation.users import arrivals, day_curve
from rollout.errors import ConfigError

USER = '{"time": 1.5, "prompt_tokens": 7, "output_tokens": 9}\n'
RATE = '{"time": 0, "rate": 2, "prompt_tokens": 7, "output_tokens": 9}\n'


def silent(_: float) -> None:
    """Hears nothing."""


def test_both_formats_and_both_kinds_are_read(tmp_path: Path) -> None:
    lines, table = tmp_path / "users.jsonl", tmp_path / "rates.csv"
    lines.write_text(USER + "\n" + USER)
    table.write_text("time,rate,prompt_tokens,output_tokens\n0,2.5,10,20\n300,1,10,20\n")
    assert list(read(lines)) == [Arrival(1.5, 7, 9)] * 2
    assert list(read(table)) == [RatePoint(0, 2.5, 10, 20), RatePoint(300, 1, 10, 20)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", USER + "{", "a.jsonl:2: not JSON"),
        ("a.jsonl", USER + "[1]\n", "a.jsonl:2: '[1]' is no JSON object"),
        ("a.jsonl", USER + '{"time": 2}\n', "a.jsonl:2: prompt_tokens is missing"),
        ("a.jsonl", USER + USER.replace("1.5", "0.5"), "a.jsonl:2: time=0.5 after 1.5"),
        ("a.jsonl", USER + RATE.replace('"time": 0', '"time": 3'), "a.jsonl:2: rates and single arrivals"),
        ("a.jsonl", RATE.replace("2,", "-2,"), "a.jsonl:1: rate=-2"),
        ("a.jsonl", RATE.replace("2,", "NaN,"), "a.jsonl:1: rate=nan"),
        ("a.jsonl", USER.replace("7", "true"), "a.jsonl:1: prompt_tokens=True"),
        ("a.csv", "time,prompt_tokens,output_tokens\n1,2,3\n2,x,3\n", "a.csv:3: prompt_tokens='x' is no number"),
        ("a.csv", "time,prompt_tokens,output_tokens\n1,2\n", "a.csv:2: output_tokens is missing"),
        (
            "a.csv",
            "time,prompt_tokens,output_tokens\n1,2,3\n2,3,4,5,6\n",
            "a.csv:3: 5 fields, but the first line names 3",
        ),
        ("a.csv", "time,prompt_tokens,output_tokens\n1,2," + "3" * 200_000, "a.csv:2: not CSV: field larger than"),
        ("a.csv", "time," + "x" * 200_000 + "\n", "a.csv:1: not CSV: field larger than"),
        ("a.jsonl", "", "no line in it"),
        ("a.jsonl", RATE.replace("2,", "1" * 400 + ","), "a.jsonl:1: rate='1111"),
        ("a.jsonl", RATE.replace("2,", "1e12,"), "a.jsonl:1: rate=1000000000000.0 is not at least 0 and at most 1e+09"),
        ("a.jsonl", RATE.replace("rate", "Rate"), "a.jsonl:1: Rate is not known; users a second are called rate"),
        ("a.csv", "time,rps,prompt_tokens,output_tokens\n0,2,3,4\n", "a.csv:2: rps is not known"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        list(read(tmp_path / name))
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_mark_of_the_byte_order_is_no_part_of_the_first_name(tmp_path: Path, name: str) -> None:
    text = USER if name == "a.jsonl" else "time,prompt_tokens,output_tokens\n1.5,7,9\n"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert list(read(tmp_path / name)) == [Arrival(1.5, 7, 9)]


def test_what_can_be_read_once_only_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="no regular file"):
        list(read(tmp_path / "a.jsonl"))


def test_single_users_end_with_the_last_and_rates_hold_on() -> None:
    users = [Arrival(time, 7, 9) for time in (0.0, 3.0, 41.0)]
    assert told_s(users, most=600.0, whole_s=10.0) == 50.0
    assert told_s(users, most=30.0, whole_s=10.0) == 30.0
    assert told_s([RatePoint(0, 1, 7, 9)], most=600.0, whole_s=10.0) == 600.0
    with pytest.raises(ConfigError, match=r"begins at time=3, and 0.0005\d* hours"):
        told_s(users[1:], most=2.0, whole_s=10.0)


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(USER + "{")
    assert next(read(tmp_path / "a.jsonl")) == Arrival(1.5, 7, 9)


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 9)), min_size=1, max_size=20),
    st.sampled_from([7.0, 10.0, 300.0]),
)
def test_as_many_users_in_the_spans_as_in_the_rates(points: list[tuple[float, float]], span_s: float) -> None:
    seconds = 4200.0
    lines = [RatePoint(at, rate, 10, 20) for at, rate in sorted(points)]
    ends = [*(line.time for line in lines[1:]), seconds]
    expected = sum(line.rate * max(0.0, min(end, seconds) - line.time) for line, end in zip(lines, ends, strict=True))
    load = load_of(lines, seconds=seconds, span_s=span_s, seen=silent)
    assert load.users == pytest.approx(expected, abs=1e-6)


def test_users_of_a_rate_are_as_many_and_the_same_for_a_seed() -> None:
    lines = [RatePoint(0, 4.0, 10, 20), RatePoint(500, 0.0, 10, 20), RatePoint(1000, 1.0, 10, 20)]
    users = list(arrivals(lines, seconds=2000.0, seed=3))
    assert users == list(arrivals(lines, seconds=2000.0, seed=3))
    assert len(users) == pytest.approx(3000, rel=0.1)
    assert not [user for user in users if 500 <= user.time < 1000]
    assert all(earlier.time <= later.time for earlier, later in pairwise(users))


def test_the_example_is_a_day_with_a_night() -> None:
    points = list(day_curve(10.0, seed=1))
    assert len(points) == 288
    assert points == list(day_curve(10.0, seed=1))
    night, noon = points[4 * 12].rate, max(point.rate for point in points)
    assert night < 0.1 * noon <= 1.0


def test_single_users_tell_of_a_rate_and_not_of_chance() -> None:
    source, at, users = random.Random(0), 0.0, list[Arrival]()
    while (at := at + source.expovariate(0.45)) < 7200:
        users.append(Arrival(at, 200, 600))
    load = load_of(users, seconds=7200.0, span_s=10.0, seen=silent)
    assert load.users == pytest.approx(len(users))
    assert max(load.rates) < 1.4 * 0.45
    crowd = [Arrival(750 + 0.01 * number, 200, 600) for number in range(1000)]
    burst = load_of(sorted([*users, *crowd], key=lambda user: user.time), seconds=7200.0, span_s=10.0, seen=silent)
    assert max(burst.rates) > 90  # a real one stays what it was
    assert load_of([RatePoint(0, 0.45, 1, 1)], seconds=60.0, span_s=10.0, seen=silent).rates == (0.45,) * 6
