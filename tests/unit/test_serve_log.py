"""Serve's log of a replica, after vLLM has configured `logging` as it does when it is imported."""

import logging
import logging.config
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from services import serve_log
from services.serve_log import SERVE, reopen_serve_log


class ServeReplica:
    """As Serve's, as far as its log goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deployment_config = SimpleNamespace(logging_config={"log_level": "INFO"})
        self.times = 0
        self._configure_logger_and_profilers(self._deployment_config.logging_config)

    def _configure_logger_and_profilers(self, logging_config: dict[str, str]) -> None:
        self.times += 1
        logger = logging.getLogger(SERVE)
        logger.handlers.clear()
        logger.setLevel(logging_config["log_level"])
        logger.addHandler(MemoryHandler(1, target=logging.FileHandler(self._path)))


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeReplica]:
    logger = logging.getLogger(SERVE)
    former, level = list(logger.handlers), logger.level
    replica = ServeReplica(tmp_path / "replica.log")
    monkeypatch.setattr(serve_log, "serve_replica", lambda: replica)
    yield replica
    logger.handlers[:] = former
    logger.setLevel(level)


def close_as_vllm_does() -> None:
    """As far as Serve's handler is concerned; those of pytest are to stay as they are."""
    for handler in logging.getLogger(SERVE).handlers:
        handler.close()


def test_lines_reach_the_file_again(replica: ServeReplica, tmp_path: Path) -> None:
    close_as_vllm_does()
    logging.getLogger(SERVE).warning("lost")
    reopen_serve_log()
    logging.getLogger(SERVE).warning("kept")
    text = (tmp_path / "replica.log").read_text()
    assert ("lost" in text, "kept" in text) == (False, True)


def test_a_log_that_is_open_is_left_alone(replica: ServeReplica) -> None:
    reopen_serve_log()
    assert replica.times == 1


def test_nothing_happens_outside_a_replica() -> None:
    reopen_serve_log()
