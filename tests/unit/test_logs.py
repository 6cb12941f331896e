"""What the processes of a fleet write of an error: where it came from, and nothing that a user sent."""

from collections.abc import Iterator

import pytest
import structlog

from services.logs import plain_logs


@pytest.fixture
def configured() -> Iterator[None]:
    former = structlog.get_config()
    plain_logs()
    yield
    structlog.configure(**former)


def test_a_traceback_shows_no_local_variables(configured: None, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "private " + "words"
    try:
        assert prompt
        raise KeyError("gone")
    except KeyError as error:
        structlog.get_logger("x").error("request failed", path="/v1", exc_info=error)
    written = capsys.readouterr().out
    assert "request failed" in written
    assert "test_logs.py" in written
    assert "KeyError: 'gone'" in written
    assert "private words" not in written
    assert "\x1b[" not in written
