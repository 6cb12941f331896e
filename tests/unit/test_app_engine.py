"""What Ray Serve LLM says of an engine's arguments is told by the setting that gave them."""

import pytest

from rollout.errors import ConfigError
from services import app


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        ("Unknown engine argument: nosuch", ConfigError, r"^engine\.extra\.nosuch is no argument of vLLM's$"),
        ("something else", ValueError, "^something else$"),
    ],
)
def test_an_argument_that_vllm_does_not_know_is_named_as_its_setting(
    said: str, error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise ValueError(said)

    monkeypatch.setattr(app, "build_llm_deployment", build)
    with pytest.raises(error, match=told):
        app._engine(None, {})  # type: ignore[arg-type]
