"""No token id that the model has no embedding for gets past the gateway."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from services.gateway_app import build_app
from services.tokenizer import HuggingFaceTokenizer
from tests.tiny_models import build_policy
from tests.unit.gateway_kit import MODEL, ROLLOUT, bearer, kit

CONFIGS = ["flat", "nested"]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose tokenizer got a token more than its embedding has rows, as Llama with an added <pad>."""
    directory = build_policy(tmp_path_factory.mktemp("model") / request.param, "qwen3_tied")
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = len(AutoTokenizer.from_pretrained(directory))
    config = {"text_config": config, "model_type": config["model_type"]} if request.param == "nested" else config
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<added>"]})
    tokenizer.save_pretrained(directory)
    return directory


def rows(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def test_the_bound_is_what_the_model_has_embeddings_for(model: Path) -> None:
    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.vocab_size == rows(model)
    assert max(tokenizer.text("a<added>").ids) >= rows(model)


def test_the_bound_is_the_tokenizers_where_the_config_names_none(model: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert HuggingFaceTokenizer(tmp_path).vocab_size == rows(model) + 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a<added>"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a<added>"]}, "prompt.1"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a<added>"}]}, "messages"),
        ("/v1/rollouts", {"prompts": ["a<added>"]}, "prompts"),
        ("/v1/rollouts", {"prompts": [[{"role": "user", "content": "a<added>"}]]}, "prompts"),
    ],
)
async def test_text_with_a_token_the_model_does_not_know_is_refused(
    model: Path, path: str, body: dict[str, Any], field: str
) -> None:
    tokenizer = HuggingFaceTokenizer(model)
    tokenizer._tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    sent = body if path == "/v1/rollouts" else {"model": MODEL, "max_tokens": 4, **body}
    app = build_app(kit(tokenizer=tokenizer).parts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.post(path, json=sent, headers=bearer(ROLLOUT))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "untokenisable")
    assert f"vocabulary size of {rows(model)}" in error["message"]
