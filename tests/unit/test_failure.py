"""A fleet that fails to start names the reason, however deep Serve and vLLM have buried it."""

from pathlib import Path

import pytest

from deploy.failure import engine_error, last_exception

NESTED = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica (pid=1)
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "services/rehearsal.py", line 163, in _load_and_compare
    raise RehearsalFailed(
services.rehearsal.RehearsalFailed: rehearsal: it cannot compute
"""


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [NESTED, ""],
            "services.rehearsal.RehearsalFailed: rehearsal: it cannot compute",
        ),
        (["waiting", "ValueError: no such file\n\n"], "ValueError: no such file"),
        (["Deploying 1 replica.", None], "Deploying 1 replica."),
        ([None, ""], "no reason given"),
    ],
)
def test_the_reason_is_the_innermost_exception(messages: list[str | None], reason: str) -> None:
    assert last_exception(messages) == reason


def test_the_engines_own_error_is_found_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "worker-1.out").write_text(
        "(Worker pid=9) ERROR 11-21 12:55:15 [executor.py:1063] RuntimeError: Unsupported head_dim=16\n"
        "(EngineCore pid=8) ERROR 11-21 12:55:15 [core.py:1512]     raise RuntimeError(\n"
        "(EngineCore pid=8) ERROR 11-21 12:55:15 [core.py:1512] RuntimeError: Worker failed, see above\n"
        "(MainProcess pid=7) ERROR 11-21 12:55:15 [async_llm.py:906] EngineDeadError: EngineCore encountered an issue\n"
    )
    (tmp_path / "worker-2.err").write_bytes(b"\xff nothing\n")
    assert engine_error(tmp_path) == "RuntimeError: Unsupported head_dim=16"
    assert engine_error(tmp_path / "absent") is None
