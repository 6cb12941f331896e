"""Users as an operator recorded them: single arrivals, or a curve of their rate. JSONL or CSV, a line at a time.

    {"time": 3.2, "prompt_tokens": 180, "output_tokens": 64}                   one user, seconds from the start
    {"time": 0, "rate": 12.5, "prompt_tokens": 180, "output_tokens": 64}       users a second from here to the next line

CSV has the same names in its first line. A trace begins at midnight UTC; times do not go back.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

_MOST_TOKENS = 10_000_000
_MOST_RATE = 1e9
_OTHER_RATES = {"rps", "qps", "requests_per_second", "users_s", "rate_per_s"}
"""Names that a rate may have elsewhere: unheeded, each line would be one user."""
_ROUNDING = 1e-9
_ENOUGH, _LONGEST_S = 400, 300.0
"""Single users over whose time a rate is taken, at least, and the longest time: ten of them are by chance fifteen."""
_BEGINNING = (30, 0.1)
"""Spans from which a trace's first rate is taken, and which share of all of them at most."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One user."""

    time: float
    """Seconds."""
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Users a second from `time` to the next point."""

    time: float
    rate: float
    prompt: float
    """Tokens, on average."""
    tokens: float


Line = Arrival | RatePoint


def read(path: Path, *, longest: int | None = None, most_output: int | None = None) -> Iterator[Line]:
    """All lines of a file are of one kind. Raises ConfigError that names file, line and what is wrong with it, users of
    more than `longest` tokens and answers of more than `most_output` included: the gateway would refuse them."""
    reader = _csv if path.suffix.lower() == ".csv" else _jsonl
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: no regular file, and it is read several times; write the trace to one")
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _checked(reader(file, path), path, longest, most_output)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _checked(
    rows: Iterator[tuple[int, Mapping[str, Any]]], path: Path, longest: int | None, most_output: int | None
) -> Iterator[Line]:
    before: Line | None = None
    for number, row in rows:
        try:
            line = _line(row)
            if before is not None and type(line) is not type(before):
                raise ValueError("rates and single arrivals in one trace")
            if before is not None and line.time < before.time:
                raise ValueError(f"time={line.time:g} after {before.time:g}")
            _check_size(line, longest, most_output)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        before = line
        yield line
    if before is None:
        raise ConfigError(f"{path}: no line in it; expected users (time, prompt_tokens, output_tokens) or rates")


def _check_size(line: Line, longest: int | None, most_output: int | None) -> None:
    """Raises ValueError."""
    refused = "which the gateway refuses; set it as the fleet has it"
    if longest is not None and line.prompt + line.tokens > longest:
        raise ValueError(
            f"prompt_tokens={line.prompt:g} and output_tokens={line.tokens:g} are more than"
            f" fleet.engine.max_model_len={longest}, {refused}"
        )
    if most_output is not None and line.tokens > most_output:
        raise ValueError(
            f"output_tokens={line.tokens:g} are more than fleet.gateway.limits.max_tokens={most_output}, {refused}"
        )


def _jsonl(file: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: {text.strip()[:40]!r} is no JSON object")
        yield number, row


def _csv(file: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.DictReader(file)
    try:
        for row in rows:
            if (over := row.pop(None, None)) is not None:  # where DictReader puts fields that have no name
                names = len(rows.fieldnames or ())
                raise ConfigError(
                    f"{path}:{rows.line_num}: {names + len(over)} fields, but the first line names {names}"
                )
            yield rows.line_num, {name: value for name, value in row.items() if value not in {"", None}}
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def _line(row: Mapping[str, Any]) -> Line:
    time = _number(row, "time", least=0)
    if "rate" in row:
        sizes = (_number(row, name, least=1, most=_MOST_TOKENS) for name in ("prompt_tokens", "output_tokens"))
        return RatePoint(time, _number(row, "rate", least=0, most=_MOST_RATE), *sizes)
    if other := next((name for name in row if name.lower() == "rate" or name.lower() in _OTHER_RATES), None):
        raise ValueError(f"{other} is not known; users a second are called rate")
    whole = (round(_number(row, name, least=1, most=_MOST_TOKENS)) for name in ("prompt_tokens", "output_tokens"))
    return Arrival(time, *whole)


def _number(row: Mapping[str, Any], name: str, *, least: float, most: float = math.inf) -> float:
    if name not in row:
        raise ValueError(f"{name} is missing; the line has {', '.join(map(str, row)) or 'nothing'}")
    try:
        value = float(row[name])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={str(row[name])[:40]!r} is no number") from None
    if isinstance(row[name], bool) or not math.isfinite(value) or not least <= value <= most:
        raise ValueError(
            f"{name}={row[name]!r} is not at least {least:g}" + (f" and at most {most:g}" * (most < math.inf))
        )
    return value


def told_s(lines: Iterable[Line], *, most: float, whole_s: float) -> float:
    """Seconds that a trace tells of, at most `most`: the last rate holds on, single users end with the last of them, up
    to a multiple of `whole_s`. Raises ConfigError where the first line comes later."""
    last: Line | None = None
    for line in lines:
        if last is None and line.time >= most:
            raise ConfigError(
                f"the trace begins at time={line.time:g}, and {most / 3600:g} hours are simulated; time is seconds from"
                " the trace's beginning, so take the first from all of them, or raise --hours"
            )
        if line.time >= most or isinstance(line, RatePoint):
            return most
        last = line
    return most if last is None else min(most, whole_s * (1 + last.time // whole_s))


@dataclass(frozen=True, slots=True)
class Load:
    """Users over equal spans of time."""

    span_s: float
    rates: tuple[float, ...]
    """Users a second in each span."""
    prompt: float
    """Mean over all users, tokens."""
    tokens: float

    @property
    def seconds(self) -> float:
        return self.span_s * len(self.rates)

    @property
    def users(self) -> float:
        return sum(self.rates) * self.span_s

    @property
    def beginning(self) -> float:
        """Users a second on average over the first five minutes, or the first tenth of less than an hour."""
        spans, share = _BEGINNING
        first = self.rates[: max(1, min(spans, int(share * len(self.rates))))]
        return sum(first) / len(first)


def load_of(lines: Iterable[Line], *, seconds: float, span_s: float, seen: Callable[[float], None]) -> Load:
    """Add a trace up, up to `seconds`; `seen` hears how far it is. A rate's last point holds to the end; single users
    are counted over as long a time as says something of their rate."""
    counts = [0.0] * max(1, math.ceil(seconds / span_s - _ROUNDING))
    prompt = tokens = told = 0.0
    single = False
    for start, stop, line in _spans(lines, seconds):
        if stop - told >= span_s:
            seen(told := min(stop, seconds))
        single = isinstance(line, Arrival)
        users = 1.0 if isinstance(line, Arrival) else line.rate * (stop - start)
        _spread(counts, span_s, start, stop, users)
        prompt, tokens = prompt + users * line.prompt, tokens + users * line.tokens
    total = sum(counts)
    rates = tuple(count / span_s for count in (evened(counts, span_s) if single else counts))
    return Load(span_s, rates, prompt / total if total else 1.0, tokens / total if total else 1.0)


def evened(counts: Sequence[float], span_s: float) -> list[float]:
    """Users of single spans as their mean over several: over the fewest in which there are enough to tell of a rate,
    and at most five minutes.

    >>> evened([500.0, 600.0, 0.0, 300.0, 300.0, 0.0], 10.0)
    [500.0, 600.0, 200.0, 200.0, 200.0, 0.0]
    """
    found, block = list[float](), list[float]()
    for count in counts:
        if block and count >= _ENOUGH:  # a crowd is no chance, and not what came before it
            found += [sum(block) / len(block)] * len(block)
            block = []
        block.append(count)
        if sum(block) >= _ENOUGH or len(block) * span_s >= _LONGEST_S:
            found += [sum(block) / len(block)] * len(block)
            block = []
    return found + [sum(block) / max(1, len(block))] * len(block)


def _spans(lines: Iterable[Line], seconds: float) -> Iterator[tuple[float, float, Line]]:
    """What is counted, with its time from and to; an arrival takes none."""
    before: RatePoint | None = None
    for line in lines:
        if line.time >= seconds:
            break
        if isinstance(line, Arrival):
            yield line.time, line.time, line
            continue
        if before is not None:
            yield before.time, line.time, before
        before = line
    if before is not None:
        yield before.time, seconds, before


def _spread(counts: list[float], span_s: float, start: float, stop: float, users: float) -> None:
    place = min(int(start / span_s), len(counts) - 1)
    if stop <= start:
        counts[place] += users
        return
    while place < len(counts) and place * span_s < stop:
        inside = min(stop, (place + 1) * span_s) - max(start, place * span_s)
        counts[place] += users * inside / (stop - start)
        place += 1
