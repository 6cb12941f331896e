"""What the command line says to a wrong command, configuration or environment, and that it starts nothing then."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.config import load
from deploy.preflight import check_model
from deploy.training import replay_name, train
from rollout.errors import ConfigError
from tests.command import run

pytestmark = pytest.mark.usefixtures("command_process")


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


def test_a_recording_is_not_called_as_the_run_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The parser takes the first word that it cannot place for FILE."""
    outcome = run(capsys, "record", "--run", "demo", "out.rec")
    assert outcome.code == cli.USAGE
    assert "--run: give FILE before settings, or --run=VALUE" in outcome.stderr


def test_an_unknown_key_in_the_file_is_answered_with_the_known_ones(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(toml.read_text() + "[train.optimizer]\nlearning_rate = 1e-4\n")
    outcome = run(capsys, "train", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "train.optimizer.learning_rate: unknown key; known here: lr, betas" in outcome.stderr


def test_a_misspelt_key_is_named_before_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nightshift.toml"
    path.write_text('run = "x"\n[fleet]\nengin = 3\n')
    outcome = run(capsys, "serve", "-c", str(path))
    assert outcome.code == cli.USAGE
    assert "fleet.engin: unknown key" in outcome.stderr


@pytest.mark.parametrize("flags", [("demo", "--steps", "x"), ("doctor", "--port", "x")])
def test_what_is_no_number_is_said_so(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, *flags)
    assert outcome.code == cli.USAGE
    assert "'x' is not a whole number between 1 and" in outcome.stderr


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
    assert outcome.stderr.count("127.0.0.1:1") == 1
    assert "did not answer for 0.2 s (redis.connect_timeout_s): Connection refused. Start it" in outcome.stderr
    assert ".." not in outcome.stderr
    assert "hunter2" not in outcome.stderr


def test_train_refuses_a_reward_that_is_not_configured(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "train", "-c", str(toml), "--train.reward.name", "exact_mach")
    assert outcome.code == cli.USAGE
    for word in ("train.reward.name", "'exact_mach'", "exact_match"):
        assert word in outcome.stderr
    toml.write_text(toml.read_text() + '[rewards.functions.mine]\nfunction = "m:f"\n')
    assert load([toml], ["--train.reward.name", "mine"]).train_config().reward.name == "mine"


def test_train_refuses_a_dataset_whose_scorer_runs_text(toml: Path) -> None:
    reward = 'name = "reasoning_gym"\nparams = {dataset = "countdown"}'
    toml.write_text(toml.read_text().replace('name = "exact_match"', reward))
    with pytest.raises(ConfigError, match=r"train\.reward\.params\.dataset: 'countdown'"):
        load([toml]).train_config()
    toml.write_text(toml.read_text().replace("countdown", "spell_backward"))
    assert load([toml]).train_config().reward.params == {"dataset": "spell_backward"}
    own = '[rewards.functions.reasoning_gym]\nfunction = "m:f"\n'
    toml.write_text(toml.read_text().replace("spell_backward", "countdown") + own)
    assert load([toml]).train_config().reward.params == {"dataset": "countdown"}


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


def test_the_demo_refuses_to_train_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    for steps in ("0", "-5"):
        outcome = run(capsys, "demo", f"--steps={steps}")
        assert outcome.code == cli.USAGE
        assert steps in outcome.stderr


def test_debug_may_come_after_the_command(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.prompts\.train"):
        cli.run(["train", "-c", str(toml), "--debug"])


def test_a_model_without_a_type_is_refused_before_the_engine_starts(tmp_path: Path, model: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model_type"):
        check_model(tmp_path)


def test_train_says_by_its_quoted_name_which_fleet_it_waits_for(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins: dict[str, Any] = {
        "check_trainer": lambda config: None,
        "enter_redis": lambda stack, redis: (object(), redis.model_copy(update={"url": "unix:///s"})),
        "running_fleet": lambda state_dir, fleet: None,
        "_run": lambda *args, **options: cli.OK,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"deploy.training.{name}", stand_in)
    config = load([toml], ["--train.prompts.train", "p.jsonl", "--fleet_name", "fleet"])
    assert train(config) == cli.OK
    assert "no local fleet 'fleet' runs yet" in capsys.readouterr().err
