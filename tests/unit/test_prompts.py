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


HI = {"role": "user", "content": "hi"}


def test_the_text_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write(tmp_path / "p.jsonl", {"messages": [HI, {"role": "assistant", "content": parts, "name": "x"}]})
    seen: list[PromptSource] = []

    def tokenise(source: PromptSource) -> tuple[Sequence[int], str]:
        seen.append(source)
        return letters(source)

    (prompt,) = read_prompts(path, tokenise, max_prompt_tokens=9)
    assert prompt.prompt_text == "hiab"
    assert seen == [[HI, {"role": "assistant", "content": "ab", "name": "x"}]]


def test_what_the_tokeniser_refuses_is_named_by_file_and_number(tmp_path: Path) -> None:
    def refuse(source: PromptSource) -> tuple[Sequence[int], str]:
        raise ValueError("no template")

    with pytest.raises(ConfigError, match=r"p\.jsonl:1: messages cannot be tokenised: no template"):
        read_prompts(write(tmp_path / "p.jsonl", {"messages": [HI]}), refuse, max_prompt_tokens=9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is expected, not list"),
        ({"text": "a"}, "exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of"),
        ({"prompt": ""}, "prompt must be non-empty text"),
        ({"prompt": 3}, "prompt must be non-empty text"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": ["hi"]}, r"messages\.0 must be an object with role and content, not 'hi'"),
        ({"messages": [{"content": "no role"}]}, r"messages\.0\.role: required, but missing"),
        ({"messages": [{"role": 5, "content": "a"}]}, r"messages\.0\.role must be non-empty text, not 5"),
        ({"messages": [HI, {"role": "user"}]}, r"messages\.1\.content: required, but missing"),
        ({"messages": [HI, {"role": "user", "content": None}]}, r"messages\.1\.content must be text, not None"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\.0\.content must be text, not 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\.0\.content: content part of type 'image_url' is not supported",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"messages\.0\.content: content part 'a' is not an obj"),
        ({"prompt_ids": [1, True]}, "prompt_ids must be"),
        ({"prompt_ids": [-1]}, "prompt_ids must be"),
        ({"prompt": "abcde"}, "5 tokens, allowed are 1 to 4"),
        ('{"prompt": "a", "level": NaN}', "not JSON: NaN is not JSON; numbers must be finite"),
        ('{"prompt": "a", "level": {"x": [-Infinity]}}', "-Infinity is not JSON"),
        ('{"prompt": "a", "level": 1e999}', "'1e999' is not finite"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands there twice"),
        ('{"prompt": "a", "info": {"x": 1, "x": 2}}', "the key 'x' stands there twice"),
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
