"""What the command line says to a wrong command, configuration or environment, and that it starts nothing then."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import structlog

from deploy import cli
from deploy.config import load, write_resolved
from deploy.doctor import _findings
from deploy.preflight import check_model
from deploy.rollouts import _lines
from deploy.tokens import client_token, gateway_tokens, token_file
from deploy.training import replay_name
from rollout.errors import ConfigError
from services.config import GatewayConfig
from tests.tiny_models import build_policy


@pytest.fixture(autouse=True)
def _process_wide_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets handlers and log levels for its process; here the process goes on."""
    for name in list(os.environ):
        if name.startswith("NIGHTSHIFT_") or name == "REDIS_URL":
            monkeypatch.delenv(name)
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        yield
    signal.signal(signal.SIGTERM, handler)
    logging.disable(logging.NOTSET)
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    build_policy(directory, "llama_untied")
    return directory


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "nightshift.toml"
    path.write_text(
        f'state_dir = "{tmp_path}/state"\n[model]\npath = "{model}"\n[redis]\ndir = "{tmp_path}/redis"\n'
        f'[train]\nruns_dir = "{tmp_path}/runs"\n[train.prompts]\ntrain = "{tmp_path}/absent.jsonl"\n'
        '[train.reward]\nname = "exact_match"\n'
    )
    return path


@dataclass(frozen=True)
class Outcome:
    code: int
    stderr: str


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Outcome:
    """One command; whatever the outcome, it leaves no process."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        code = cli.run(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
    return Outcome(code, capsys.readouterr().err)


WRONG_SETTINGS = [
    (["--fleet.engine.max_num_seqs", "0"], ["fleet.engine.max_num_seqs", "'0'", "greater than or equal to 1"]),
    (["--fleet.engine.max_num_seqs", "many"], ["fleet.engine.max_num_seqs", "'many'", "integer"]),
    (["--fleet.engine.max_num_seqs", "4"], ["harvest.user_reserve=4", "engine.max_num_seqs=4"]),
    (["--fleet.engine.seats", "4"], ["--fleet.engine.seats", "unknown flag"]),
    (["--fleet.gateway.port", "70000"], ["fleet.gateway.port", "'70000'", "less than or equal to 65535"]),
    (["--fleet.gateway.port"], ["--fleet.gateway.port", "expected one argument"]),
    (["--fleet.engine.dtype", "int8"], ["fleet.engine.dtype", "'int8'", "'float32'"]),
    (["--fleet.autoscaling.min_replicas", "3"], ["min_replicas=3", "max_replicas=1"]),
    (["--redis.namespace", "Not A Name"], ["redis.namespace", "'Not A Name'", "pattern"]),
    (["--redis.outage_s", "nan"], ["redis.outage_s", "nan"]),
    (["--model.path", "/nowhere"], ["model.path=/nowhere", "no such directory"]),
    (["--fleet.gateway.host", "0.0.0.0"], ["gateway.host=0.0.0.0", "NIGHTSHIFT_USER_TOKEN"]),
    (["-c", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
    (["stray"], ["stray", "unknown"]),
]


@pytest.mark.parametrize(("flags", "words"), WRONG_SETTINGS, ids=lambda value: " ".join(value) if value else None)
def test_a_wrong_setting_is_one_line_that_names_it(
    flags: list[str], words: list[str], toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "serve", "-c", str(toml), *flags)
    assert outcome.code == cli.USAGE
    assert len(outcome.stderr.strip().splitlines()) == 1
    assert "Traceback" not in outcome.stderr
    for word in words:
        assert word in outcome.stderr


def test_an_unknown_key_in_the_file_is_answered_with_the_known_ones(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(toml.read_text() + "[train.optimizer]\nlearning_rate = 1e-4\n")
    outcome = run(capsys, "train", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "train.optimizer.learning_rate: unknown key; known here: lr, betas" in outcome.stderr


def test_a_file_that_is_not_toml_is_named_with_the_place(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml.write_text("run = \n")
    outcome = run(capsys, "serve", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "not valid TOML" in outcome.stderr
    assert "line 1" in outcome.stderr


def test_serve_refuses_a_port_that_is_taken(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run(capsys, "serve", "-c", str(toml), "--fleet.gateway.port", str(port))
    assert outcome.code == cli.USAGE
    assert f"fleet.gateway.port={port}" in outcome.stderr
    assert "another port" in outcome.stderr


def test_serve_refuses_more_memory_than_is_free(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "serve", "-c", str(toml), "--fleet.engine.kv_cache_gib", "1000")
    assert outcome.code == cli.USAGE
    assert "Not enough memory" in outcome.stderr
    assert "kv_cache_gib=1000" in outcome.stderr


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_serve_names_what_a_model_directory_lacks(
    missing: str, toml: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        if file.name != missing:
            (broken / file.name).symlink_to(file)
    outcome = run(capsys, "serve", "-c", str(toml), "--model.path", str(broken))
    assert outcome.code == cli.USAGE
    assert f"model.path={broken}" in outcome.stderr
    assert missing.removeprefix("model") in outcome.stderr


def test_serve_notices_a_weights_file_cut_short(
    toml: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-100] if file.suffix == ".safetensors" else content)
    outcome = run(capsys, "serve", "-c", str(toml), "--model.path", str(broken))
    assert outcome.code == cli.USAGE
    assert "the copy is incomplete" in outcome.stderr


def test_train_needs_its_table_and_its_prompts(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "train", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "train.prompts.train" in outcome.stderr
    toml.write_text(toml.read_text().split("[train]")[0])
    outcome = run(capsys, "train", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "[train] table" in outcome.stderr


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


def test_a_client_command_without_a_token_says_where_tokens_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "rollout", "cancel", "some-id", "--state-dir", str(tmp_path))
    assert outcome.code == cli.USAGE
    assert "NIGHTSHIFT_ROLLOUT_TOKEN" in outcome.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "not a JSON object"), ('{"text": "x"}', "exactly one of prompt"), ("[1]", "exactly one of prompt")],
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


def test_flags_win_over_the_environment_and_that_over_files(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.write_text(toml.read_text().replace("[train]\n", "[train]\nsteps = 3\nseed = 3\nbatch_groups = 3\n"))
    monkeypatch.setenv("NIGHTSHIFT_TRAIN__STEPS", "4")
    monkeypatch.setenv("NIGHTSHIFT_TRAIN__SEED", "4")
    monkeypatch.setenv("REDIS_URL", "redis://example.invalid:1")
    train = load([toml], ["--train.steps", "5"]).train_config()
    assert (train.steps, train.seed, train.batch_groups) == (5, 4, 3)
    assert train.redis.url == "redis://example.invalid:1"


def test_a_later_file_wins_key_by_key(toml: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.toml"
    second.write_text("[train]\nsteps = 9\n")
    train = load([toml, second]).train_config()
    assert train.steps == 9
    assert train.reward.name == "exact_match"


def test_paths_given_to_the_processes_are_absolute(toml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([toml], ["--model.path", "policy", "--redis.dir", "data"])
    assert config.fleet_config().model.path == tmp_path / "policy"
    assert config.train_config().redis.dir == tmp_path / "data"


def test_tokens_are_made_once_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    first = gateway_tokens(GatewayConfig(), tmp_path)
    second = gateway_tokens(GatewayConfig(), tmp_path)
    assert (first.user, first.rollout, first.admin) == (second.user, second.rollout, second.admin)
    assert len({first.user, first.rollout, first.admin}) == 3
    assert token_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert first.admin not in repr(first)


def test_a_damaged_token_file_is_reported_not_replaced(tmp_path: Path) -> None:
    token_file(tmp_path).write_text("{")
    with pytest.raises(ConfigError, match="delete it"):
        gateway_tokens(GatewayConfig(), tmp_path)


@pytest.mark.parametrize("command", ["train", "record"])
def test_help_imports_nothing_heavy(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deploy.cli", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--config" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not loaded & {"torch", "ray", "vllm", "deepspeed", "transformers", "pydantic"}


def test_doctor_answers_as_json_with_a_verdict_for_each_check(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code = cli.run(["doctor", "--json", "--port", "1", "--model", str(model)])
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "gcc", "memory", "redis-server", "vllm", "port", "model"} <= findings.keys()
    assert findings["model"]["verdict"] == "ok"
    assert code == (2 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


def test_doctor_fails_with_the_remedy_on_a_broken_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.run(["doctor", "--json", "--model", str(tmp_path)])
    (finding,) = [item for item in json.loads(capsys.readouterr().out) if item["check"] == "model"]
    assert code == cli.USAGE
    assert finding["verdict"] == "fail"
    assert "config.json is missing" in finding["remedy"]


@pytest.mark.parametrize("command", ["train", "serve"])
@pytest.mark.parametrize("url", ["localhost:6379", "redis://h:notaport", ""])
def test_what_is_no_address_of_redis_is_refused_before_anything_starts(
    url: str, command: str, toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "absent.jsonl").write_text('{"prompt": "a"}\n')
    outcome = run(capsys, command, "-c", str(toml), "--redis.url", url, "--fleet.gateway.port", "18431")
    assert outcome.code == cli.USAGE
    assert "redis.url" in outcome.stderr
    assert len(outcome.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "serve"])
def test_a_redis_that_does_not_answer_is_named_without_its_password(
    command: str, toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "absent.jsonl").write_text('{"prompt": "a"}\n')
    flags = ["--redis.url", "redis://:hunter2@127.0.0.1:1", "--redis.connect_timeout_s", "0.2"]
    outcome = run(capsys, command, "-c", str(toml), *flags, "--fleet.gateway.port", "18431")
    assert outcome.code == cli.UNAVAILABLE
    assert "127.0.0.1:1" in outcome.stderr
    assert "hunter2" not in outcome.stderr


def test_the_configuration_on_disk_is_the_owners_and_has_no_passwords(toml: Path, tmp_path: Path) -> None:
    flags = ["--redis.url", "redis://me:hunter2@h:1", "--fleet.gateway.auth.user", "swordfish"]
    path = tmp_path / "resolved" / "config.json"
    write_resolved(load([toml], flags).fleet_config(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["redis"]["url"] == "redis://***@h:1"
    assert "swordfish" not in path.read_text()


def test_a_token_of_a_wrong_type_is_not_repeated(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml.write_text(toml.read_text() + "[fleet.gateway.auth]\nuser = 918273645\n")
    outcome = run(capsys, "serve", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "fleet.gateway.auth.user" in outcome.stderr
    assert "918273645" not in outcome.stderr


def test_train_refuses_a_reward_that_is_not_configured(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "train", "-c", str(toml), "--train.reward.name", "exact_mach")
    assert outcome.code == cli.USAGE
    for word in ("train.reward.name", "'exact_mach'", "exact_match"):
        assert word in outcome.stderr
    toml.write_text(toml.read_text() + '[rewards.functions.mine]\nfunction = "m:f"\n')
    assert load([toml], ["--train.reward.name", "mine"]).train_config().reward.name == "mine"


def test_a_replay_says_what_is_wrong_with_its_file_and_needs_no_prompts(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "train", "-c", str(toml), "--replay", str(tmp_path / "absent.rec"))
    assert outcome.code == cli.USAGE
    assert "absent.rec: cannot be read" in outcome.stderr
    (tmp_path / "notes.rec").write_text("no recording\n" * 9)
    outcome = run(capsys, "train", "-c", str(toml), "--replay", str(tmp_path / "notes.rec"))
    assert outcome.code == cli.USAGE
    assert "not a recording" in outcome.stderr


def test_a_replay_has_a_run_of_its_own() -> None:
    assert [replay_name(run) for run in ("mine", "mine-replay")] == ["mine-replay", "mine-replay"]
    with pytest.raises(ConfigError, match="shorten --run"):
        replay_name("x" * 60)


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_doctor_refuses_what_is_no_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "doctor", f"--port={port}")
    assert outcome.code == cli.USAGE
    assert port in outcome.stderr
    assert "65535" in outcome.stderr


def test_doctor_knows_the_port_of_its_own_fleet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        announced = {"pid": os.getpid(), "url": f"http://127.0.0.1:{port}"}
        (tmp_path / "mine.json").write_text(json.dumps(announced))
        own = [f for f in _findings(port, None, tmp_path) if f.check == "port"]
        other = [f for f in _findings(port, None, tmp_path / "elsewhere") if f.check == "port"]
    assert [f.verdict for f in own + other] == ["ok", "fail"]


def test_the_demo_refuses_to_train_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for steps in ("0", "-5"):
        outcome = run(capsys, "demo", f"--steps={steps}")
        assert outcome.code == cli.USAGE
        assert steps in outcome.stderr


def test_debug_may_come_after_the_command(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.prompts\.train"):
        cli.run(["train", "-c", str(toml), "--debug"])


def test_a_token_that_no_header_can_carry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_ADMIN_TOKEN", "schlüssel")
    outcome = run(capsys, "status", "--state-dir", str(tmp_path))
    assert outcome.code == cli.USAGE
    assert "NIGHTSHIFT_ADMIN_TOKEN" in outcome.stderr
    assert "schlüssel" not in outcome.stderr


def test_a_chosen_token_ends_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gateway_tokens(GatewayConfig(), tmp_path)
    monkeypatch.setenv("NIGHTSHIFT_USER_TOKEN", "chosen-by-hand")
    chosen = gateway_tokens(GatewayConfig(), tmp_path)
    assert (chosen.user, client_token("user", tmp_path)) == ("chosen-by-hand", "chosen-by-hand")
    monkeypatch.delenv("NIGHTSHIFT_USER_TOKEN")
    assert client_token("user", tmp_path) == "chosen-by-hand"
    after = gateway_tokens(GatewayConfig(), tmp_path)
    assert after.user not in {"chosen-by-hand", ""}
    assert (after.rollout, after.admin) == (first.rollout, first.admin)


def test_a_tilde_is_the_home_directory_everywhere(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--state_dir", "~/s", "--train.prompts.train", "~/p.jsonl", "--train.runs_dir", "~/r"]
    config = load([toml], flags)
    train = config.train_config()
    assert (config.state_dir, train.prompts.train, train.runs_dir) == tuple(tmp_path / n for n in ("s", "p.jsonl", "r"))


def test_a_prompt_may_hold_any_unicode_line_separator(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [entry["prompt"] for entry in _lines(file)] == ["a\u2028b", "c"]


def test_a_model_without_a_type_is_refused_before_the_engine_starts(tmp_path: Path, model: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model_type"):
        check_model(tmp_path)


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
