"""What the commands that talk to a running gateway say to wrong prompts and to a server that is not there."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy import cli
from deploy.rollouts import _lines
from deploy.tokens import gateway_tokens
from services.config import GatewayConfig
from tests.command import run

pytestmark = pytest.mark.usefixtures("command_process")


def test_what_is_no_address_of_a_gateway_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gateway_tokens(GatewayConfig(), tmp_path)
    outcome = run(capsys, "status", "--state-dir", str(tmp_path), "--url", "nonsense")
    assert outcome.code == cli.USAGE
    assert "--url 'nonsense'" in outcome.stderr


def test_a_server_that_is_not_there_is_named_with_the_remedy(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    gateway_tokens(GatewayConfig(), state)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    outcome = run(capsys, "status", "--state-dir", str(state), "--url", f"http://127.0.0.1:{port}")
    assert outcome.code == cli.UNAVAILABLE
    assert f"127.0.0.1:{port}" in outcome.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object"),
        ('{"text": "x"}', "exactly one of prompt"),
        ("[1]", "exactly one of prompt"),
        ('{"prompt": "x", "score": NaN}', "NaN"),
        ('{"prompt": "x", "prompt": "y"}', "twice"),
    ],
)
def test_submit_names_the_line_of_a_bad_prompt(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway_tokens(GatewayConfig(), tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    outcome = run(capsys, "rollout", "submit", str(file), "--state-dir", str(tmp_path))
    assert outcome.code == cli.USAGE
    assert f"{file}:2" in outcome.stderr
    assert words in outcome.stderr


def test_a_prompt_may_hold_any_unicode_line_separator(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [entry["prompt"] for entry in _lines(file)] == ["a\u2028b", "c"]


def test_submit_names_the_run_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(202)
            self.end_headers()
            self.wfile.write(b'{"id": "mine~1", "run": "mine", "group_ids": [], "replayed": false}')

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("NIGHTSHIFT_RUN", "mine")
    monkeypatch.setenv("NIGHTSHIFT_ROLLOUT_TOKEN", "t")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.run(["rollout", "submit", "-p", "a", "--url", url, "--state-dir", str(tmp_path)]) == 0
    assert bodies[0]["run"] == "mine"
