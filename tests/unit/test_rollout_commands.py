"""What `nightshift rollout submit` asks the gateway for."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import rollouts
from deploy.cli import run
from rollout.errors import ConfigError

pytestmark = pytest.mark.usefixtures("command_process")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last `submit` sent."""
    found: dict[str, Any] = {}

    def submit(prompts: list[Any], **fields: Any) -> SimpleNamespace:
        found.update(fields, prompts=prompts)
        return SimpleNamespace(id="default~1")

    @contextmanager
    def gateway(_: argparse.Namespace, role: str) -> Iterator[SimpleNamespace]:
        assert role == "rollout"
        yield SimpleNamespace(submit=submit)

    monkeypatch.setattr(rollouts, "gateway", gateway)
    return found


def test_what_is_left_out_is_left_to_the_gateway(sent: dict[str, Any]) -> None:
    assert run(["rollout", "submit", "-p", "hello"]) == 0
    assert (sent["prompts"], sent["sampling"], sent["reward"]) == (
        ["hello"],
        {"max_tokens": None, "temperature": 1.0},
        None,
    )


def test_a_reward_is_given_its_parameters(sent: dict[str, Any]) -> None:
    for given, params in (([], {}), (["--reward-params", '{"ignore_case": true}'], {"ignore_case": True})):
        assert run(["rollout", "submit", "-p", "hello", "--reward", "exact_match", *given]) == 0
        assert sent["reward"] == {"name": "exact_match", "params": params}


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("exact_match", "[1]", "a JSON object is expected"),
        ("exact_match", "{", "--reward-params: "),
        ("exact_match", '{"a": NaN}', "--reward-params: "),
        (None, "{}", "without --reward"),
    ],
)
def test_parameters_that_are_none_are_refused(name: str | None, params: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rollouts._reward(name, params)
