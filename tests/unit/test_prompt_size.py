"""No prompt that cannot fit is tokenised, and no request keeps the tokenizer from all others."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway_app import build_app
from services.prompt_size import CHARS_PER_TOKEN, PromptBounds, characters
from services.tokenizer import _TURN_CHARS, PromptReader, TokenisedPrompt, _turns
from tests.unit.gateway_kit import MODEL, ROLLOUT, WordTokenizer, bearer, fleet, kit

MOST = CHARS_PER_TOKEN * 64  # of the kit's max_model_len
MANY = "x" * (MOST + 1)
WORDS = [f"{MOST + 1} characters", f"{MOST}", "gateway.limits.max_prompt_chars", "engine.max_model_len=64"]


class Untouched(WordTokenizer):
    def text(self, prompt: str) -> TokenisedPrompt:
        raise AssertionError("tokenised")

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenisedPrompt:
        raise AssertionError("tokenised")

    def token_ids(self, ids: Sequence[int]) -> TokenisedPrompt:
        raise AssertionError("tokenised")


def message(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": "hi", **more}


CALL = {"function": {"arguments": [1] * MOST}}
TOOL = {"type": "function", "function": {"name": "look", "description": MANY, "parameters": {}}}
REFUSED = [
    ("/v1/completions", {"prompt": MANY}, 400, "prompt", WORDS),
    ("/v1/completions", {"prompt": ["a", MANY]}, 400, "prompt.1", WORDS),
    ("/v1/completions", {"prompt": [1] * 65}, 400, "prompt", ["65", "64", "engine.max_model_len"]),
    ("/v1/chat/completions", {"messages": [message(content=MANY)]}, 400, "messages", [str(MOST)]),
    ("/v1/chat/completions", {"messages": [message()] * 100}, 400, "messages", [str(MOST)]),
    ("/v1/chat/completions", {"messages": [message(name=MANY)]}, 400, "messages", [str(MOST)]),
    ("/v1/chat/completions", {"messages": [message()], "tools": [TOOL], "tool_choice": "none"}, 400, "messages", []),
    ("/v1/chat/completions", {"messages": [message()], "chat_template_kwargs": {"a": MANY}}, 400, "messages", []),
    (
        "/v1/chat/completions",
        {"messages": [message(tool_calls=[CALL])]},
        400,
        "messages",
        [],
    ),
    (
        "/v1/chat/completions",
        {"messages": [message()], "chat_template_kwargs": {"a": [[]] * MOST}},
        400,
        "messages",
        [],
    ),
    ("/v1/rollouts", {"prompt": [message(more=[None, True, [], {}, 1.5] * (MOST // 10))]}, 422, "prompt", [str(MOST)]),
    ("/v1/rollouts", {"prompts": ["a", MANY]}, 422, "prompts.1", WORDS),
    ("/v1/rollouts", {"prompt": [message(content=MANY)]}, 422, "prompt", [str(MOST)]),
    ("/v1/rollouts", {"prompts": [[1] * 65]}, 422, "prompts", ["65", "64", "engine.max_model_len"]),
]


@pytest.mark.parametrize(("path", "body", "status", "field", "words"), REFUSED)
async def test_a_prompt_that_cannot_fit_is_refused_and_not_tokenised(
    path: str, body: dict[str, Any], status: int, field: str, words: list[str]
) -> None:
    sent = body if path == "/v1/rollouts" else {"model": MODEL, "max_tokens": 4, **body}
    app = build_app(kit(tokenizer=Untouched()).parts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.post(path, json=sent, headers=bearer(ROLLOUT))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["code"] in {"over_limit", "context_length_exceeded"}
    assert [word for word in words if word not in error["message"]] == [], error["message"]


async def test_a_prompt_at_the_bound_is_tokenised() -> None:
    reader = PromptReader(WordTokenizer(), PromptBounds.of(fleet()))
    (read,) = await reader.read(["x" * MOST], field="prompt", status=400)
    assert len(read.ids) == 1


def test_the_operators_bound_goes_before_the_derived_one() -> None:
    given_ = PromptBounds.of(fleet(max_prompt_chars=5))
    assert (given_.max_chars, given_.knob) == (5, "gateway.limits.max_prompt_chars")


JSON = st.recursive(
    st.text() | st.integers() | st.none(), lambda of: st.lists(of) | st.dictionaries(st.text(), of), max_leaves=20
)


def plain(value: Any) -> int:
    if isinstance(value, dict):
        return 2 + sum(plain(key) + plain(item) for key, item in value.items())
    if isinstance(value, list):
        return 2 + sum(map(plain, value))
    return max(1, len(value)) if isinstance(value, str) else len(str(value))


@given(JSON, st.integers(0, 50))
def test_all_text_counts_as_far_as_it_matters(value: Any, enough: int) -> None:
    counted, whole = characters(value, enough), plain(value)
    assert counted == whole if whole <= enough else enough < counted <= whole


@given(st.lists(st.integers(0, 2 * _TURN_CHARS), max_size=30))
def test_turns_are_all_prompts_in_order_and_none_is_long(sizes: list[int]) -> None:
    turns = list(_turns(sizes))
    assert [i for turn in turns for i in range(turn.start, turn.stop)] == list(range(len(sizes)))
    for turn in turns:
        assert turn.stop == turn.start + 1 or sum(sizes[turn]) <= _TURN_CHARS


async def test_a_request_with_many_large_prompts_lets_others_through_between_them() -> None:
    began, go, order = threading.Event(), threading.Event(), list[str]()

    class Ordered(WordTokenizer):
        def text(self, prompt: str) -> TokenisedPrompt:
            began.set()
            assert go.wait(10)
            order.append(prompt[0])
            return super().text(prompt)

    reader = PromptReader(Ordered(), PromptBounds(max_tokens=1_000_000, max_chars=1_000_000, knob=""))
    large = asyncio.create_task(reader.read(["L" * _TURN_CHARS] * 3, field="prompt", status=400))
    assert await asyncio.to_thread(began.wait, 10)
    small = asyncio.create_task(reader.read(["s"], field="prompt", status=400))
    await asyncio.sleep(0)
    go.set()
    assert len(await small) == 1
    assert len(await large) == 3
    assert order == ["L", "s", "L", "L"]
