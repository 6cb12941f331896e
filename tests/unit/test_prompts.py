import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.prompts import Prompt, PromptSource, epoch_order, read_prompts, take


def letters(source: PromptSource) -> tuple[Sequence[int], str]:
    if isinstance(source, str):
        return [ord(c) for c in source], source
    if isinstance(source[0], int):
        return [int(str(i)) for i in source], "".join(map(str, source))
    text = "".join(str(m["content"]) for m in source if not isinstance(m, int))
    return [ord(c) for c in text], text


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_all_three_forms_are_read_and_the_rest_is_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "ab", "answer": "ba", "level": 3},
        "",
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_ids": [5, 6]},
    )
    assert read_prompts(path, letters, max_prompt_tokens=4) == [
        Prompt((97, 98), "ab", {"answer": "ba", "level": 3}),
        Prompt((104, 105), "hi", {}),
        Prompt((5, 6), "56", {}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is expected, not list"),
        ({"text": "a"}, "exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of"),
        ({"prompt": ""}, "prompt must be non-empty text"),
        ({"prompt": 3}, "prompt must be non-empty text"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"content": "no role"}]}, "messages must be"),
        ({"prompt_ids": [1, True]}, "prompt_ids must be"),
        ({"prompt_ids": [-1]}, "prompt_ids must be"),
        ({"prompt": "abcde"}, "5 tokens, allowed are 1 to 4"),
        ({"messages": [{"role": "user"}]}, "cannot be tokenised"),
        ({"prompt": "a", "answer": 2**70}, "cannot be stored: Integer value out of range"),
        ({"prompt": "a", "answer": "\ud83d"}, "cannot be stored: .*surrogate"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "ok"}, line)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path, letters, max_prompt_tokens=4)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_bytes_that_are_not_text_are_named_too(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1"):
        read_prompts(path, letters, max_prompt_tokens=4)


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "none", letters, max_prompt_tokens=4)
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", ""), letters, max_prompt_tokens=4)


@given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 9))
def test_every_epoch_uses_every_prompt_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(count, seed=seed, epoch=epoch)) == list(range(count))


@given(st.integers(1, 20), st.integers(0, 100), st.lists(st.integers(0, 15), max_size=6))
def test_a_resumed_cursor_continues_the_same_sequence(count: int, start: int, steps: list[int]) -> None:
    whole = take(count, seed=1, cursor=start, amount=sum(steps))
    pieces, cursor = [], start
    for step in steps:
        pieces += take(count, seed=1, cursor=cursor, amount=step)
        cursor += step
    assert pieces == whole


def test_the_order_is_the_same_on_every_machine() -> None:
    assert take(5, seed=7, cursor=3, amount=6) == take(5, seed=7, cursor=0, amount=9)[3:]
    assert epoch_order(6, seed=7, epoch=0) != epoch_order(6, seed=7, epoch=1)
