"""`nightshift doctor` says what is wrong, and what to do about it."""

import json
import os
import socket
from pathlib import Path

import pytest

from deploy import cli, doctor
from deploy.announcement import announce, only_one
from deploy.doctor import _findings
from tests.command import run

pytestmark = pytest.mark.usefixtures("command_process")


def test_doctor_answers_as_json_with_a_verdict_for_each_check(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code = cli.run(["doctor", "--json", "--port", "1", "--model", str(model)])
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "gcc", "memory", "redis-server", "vllm", "environment", "port", "model"} <= findings.keys()
    assert findings["model"]["verdict"] == "ok"
    assert code == (2 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


def test_doctor_fails_with_the_remedy_on_a_broken_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.run(["doctor", "--json", "--model", str(tmp_path)])
    (finding,) = [item for item in json.loads(capsys.readouterr().out) if item["check"] == "model"]
    assert code == cli.USAGE
    assert finding["verdict"] == "fail"
    assert "config.json is missing" in finding["remedy"]


def test_doctor_fails_where_the_environment_opens_the_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert cli.run(["doctor", "--json", "--port", "1"]) == cli.USAGE
    (finding,) = [item for item in json.loads(capsys.readouterr().out) if item["check"] == "environment"]
    assert (finding["verdict"], "VLLM_SERVER_DEV_MODE=1" in finding["remedy"]) == ("fail", True)


@pytest.mark.parametrize(("mode", "verdict"), [(0o600, "ok"), (0o640, "fail"), (0o644, "fail")])
def test_doctor_fails_where_others_may_read_the_tokens_of_the_service(
    mode: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SERVICE_ENVIRONMENT", file := tmp_path / "environment")
    assert list(doctor._service_environment()) == []
    file.touch()
    file.chmod(mode)
    (finding,) = doctor._service_environment()
    assert finding.verdict == verdict
    assert (f"chmod 600 {file}" in finding.remedy) == (verdict == "fail")


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_doctor_refuses_what_is_no_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "doctor", f"--port={port}")
    assert outcome.code == cli.USAGE
    assert port in outcome.stderr
    assert "65535" in outcome.stderr


def test_doctor_knows_the_port_of_its_own_fleet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with only_one(tmp_path, "mine"):
            announce(tmp_path, "mine", {"pid": os.getpid(), "url": f"http://127.0.0.1:{port}"})
            own = [f for f in _findings(port, None, tmp_path) if f.check == "port"]
        gone = [f for f in _findings(port, None, tmp_path) if f.check == "port"]
        other = [f for f in _findings(port, None, tmp_path / "elsewhere") if f.check == "port"]
    assert [f.verdict for f in own + gone + other] == ["ok", "fail", "fail"]
