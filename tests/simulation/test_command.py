"""`nightshift simulate` from its command line."""

import json
from pathlib import Path

import pytest

from deploy import cli
from tests.command import run

pytestmark = pytest.mark.usefixtures("command_process")

FLEET = "[fleet.engine]\nmax_num_seqs = 8\n[fleet.slo]\nttft_s = 0.5\ntpot_s = 0.06\n"
TRACE = "time,rate,prompt_tokens,output_tokens\n0,1.5,40,20\n60,0.5,40,20\n"
LEND = (
    *("--fleet.sharing.mode", "lend", "--fleet.lending.production.path", "."),
    *("--fleet.autoscaling.min_replicas", "2", "--fleet.autoscaling.max_replicas", "2"),
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "users.csv").write_text(TRACE)
    return tmp_path


def arguments(files: Path, *more: str) -> list[str]:
    return [
        *("simulate", "--trace", str(files / "users.csv"), "--settings", str(files / "fleet.toml")),
        *("--hours", "0.03", *more),
    ]


def test_it_answers_and_writes_figures_and_a_picture(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = files / "first.json", files / "again.json"
    assert cli.run(arguments(files, "--json", str(first), "--plot", str(files / "day.png"))) == cli.OK
    assert "rollout tokens a day" in capsys.readouterr().out
    assert cli.run(arguments(files, "--json", str(again))) == cli.OK
    assert first.read_bytes() == again.read_bytes()
    content = json.loads(first.read_text())
    assert content["way"] == "requests"
    assert content["rollout_tokens_per_day"] > 0
    assert content["attainment_alone"] >= content["attainment"] - 0.02
    assert (files / "day.png").read_bytes().startswith(b"\x89PNG")


def test_a_fleet_that_lends_says_what_was_lent(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = files / "day.json", files / "day.png"
    at_once = ("--fleet.lending.lend_after_s", "0", "--fleet.lending.min_gain", "0")
    assert cli.run(arguments(files, *LEND, *at_once, "--json", str(file), "--plot", str(plot))) == cli.OK
    assert "switches a day" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["way"] == "replicas"
    assert content["lending"]["lends"] >= 1
    assert max(content["series"]["harvesting"]) > 0
    assert content["settings"]["lending"]["min_gain"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_settings_are_flags_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments(files, "--fleet.harvest.max_seats", "0")) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("rollout tokens a day")).endswith("  0")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--fleet.slo.tpot_s", "0.001"], ["slo.tpot_s=0.001", "idle engine needs"]),
        (["--fleet.sharing.mode", "adapter", "--fleet.sharing.user_adapter", "x"], ["sharing.user_adapter=x"]),
        ([*LEND, "--sweep"], ["--sweep", "fleet.sharing.mode=lend"]),
        ([*LEND, "--way", "requests"], ["--way requests", "fleet.sharing.mode=lend"]),
        ([*LEND, "--replicas", "1"], ["fleet.lending.min_serving=1", "--replicas 1"]),
        (["--train-step-s", "5"], ["--train-step-s 5", "[train]"]),
        (["--engine", "/nowhere.json"], ["/nowhere.json", "No such file"]),
        (["--replicas", "0"], ["--replicas", "0 is not between 1"]),
        (["--seed", "-1"], ["--seed", "-1 is not between 0"]),
        (["--hours", "0.001"], ["--hours 0.001", "10 s"]),
        (["--json", "/nowhere/day.json"], ["--json /nowhere/day.json: cannot be written"]),
        (["--plot", "/"], ["--plot /: cannot be written"]),
        (["--fleet.engine.max_num_batched_tokens", "16", "--fleet.engine.max_num_seqs", "64"], ["=16", "=64"]),
        (["--fleet.engine.max_num_seqs", "4096"], ["batched_tokens of the engine file=2048", "max_num_seqs=4096"]),
        (["--hours", "-1"], ["--hours", "'-1' is not between 0 and 8784"]),
        (["--hours", "nan"], ["--hours", "'nan' is not between 0 and 8784"]),
        (["--push-every-s", "1e-6"], ["--push-every-s", "'1e-6' is not between 0.1"]),
        (["--fleet.engine.max_model_len", "32"], ["max_model_len=32", "users.csv:"]),
        (["--fleet.gateway.limits.max_tokens", "19"], ["output_tokens=20", "fleet.gateway.limits.max_tokens=19"]),
        (["--calibrate", "x.json"], ["--calibrate", "not allowed with"]),
        (["--out", "engine.json"], ["--out does nothing with --trace, only with --calibrate"]),
        (["--load", "80"], ["--load does nothing with --trace, only with --calibrate or --validate"]),
        (["--peak", "2"], ["--peak does nothing with --trace, only with --example-trace"]),
        (["--push-every-s", "9", "--train-step-s", "5"], ["--push-every-s 9 does nothing with --train-step-s 5"]),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_named(
    files: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: list[str]
) -> None:
    outcome = run(capsys, *arguments(files, *more))
    assert outcome.code == cli.USAGE
    assert all(word in outcome.stderr for word in words)


def test_settings_without_a_trace_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "simulate", "--calibrate", str(files / "bench.json"), "--laod", "80")
    assert outcome.code == cli.USAGE
    assert "--laod: settings are for --trace FILE" in outcome.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--calibrate", "bench.json", "--json", "x.json"],
            "--json does nothing with --calibrate, only with --trace or",
        ),
        (["--calibrate", "bench.json", "--seed", "0"], "--seed does nothing with --calibrate"),
        (["--calibrate", "bench.json", "--sweep"], "--sweep does nothing with --calibrate, only with --trace"),
        (
            ["--validate", "bench.json", "--engine", "e.json"],
            "--engine does nothing with --validate, only with --trace",
        ),
        (["--validate", "bench.json", "--out", "e.json"], "--out does nothing with --validate, only with --calibrate"),
        (["--example-trace", "--replicas", "2"], "--replicas does nothing with --example-trace, only with --trace"),
        (["--example-trace", "--settings", "f.toml"], "--settings does nothing with --example-trace"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_question_does_not_read_is_refused_with_both_arguments(
    capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    outcome = run(capsys, "simulate", *more)
    assert outcome.code == cli.USAGE
    assert words in outcome.stderr


def test_the_settings_say_how_many_replicas_there_are(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling = ("--fleet.autoscaling.min_replicas", "2", "--fleet.autoscaling.max_replicas", "2")
    assert cli.run(arguments(files, *scaling)) == cli.OK
    assert "2 on average, at most 2" in capsys.readouterr().out


def test_rollouts_are_those_of_the_trainer(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    train = (files / "fleet.toml").read_text() + (
        "[rewards.functions.mine]\nfunction = 'builtins:len'\n"
        f"[train.prompts]\ntrain = '{files}/prompts.jsonl'\n[train.reward]\nname = 'mine'\n"
        "[train.sampling]\nn = 4\nmax_tokens = 96\n"
    )
    (files / "fleet.toml").write_text(train)
    assert cli.run(arguments(files, "--train-step-s", "5")) == cli.OK
    assert "groups of 4, prompts of 64 to 256 tokens, answers of 64 to 96" in capsys.readouterr().out


def test_a_trace_of_single_users_is_over_with_the_last(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = [{"time": 2.0 * number, "prompt_tokens": 40, "output_tokens": 20} for number in range(30)]
    (files / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))
    settings = ["--trace", str(files / "users.jsonl"), "--settings", str(files / "fleet.toml")]
    assert cli.run(["simulate", *settings]) == cli.OK
    assert "30 in 0.01667 h" in capsys.readouterr().out


def test_times_of_a_clock_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "users.csv").write_text("time,prompt_tokens,output_tokens\n1767225600,40,20\n")
    outcome = run(capsys, *arguments(files))
    assert outcome.code == cli.USAGE
    assert "the trace begins at time=1.76723e+09, and 0.03 hours are simulated" in outcome.stderr


def test_a_bad_line_of_the_trace_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "users.csv").write_text(TRACE + "oops,1,2,3\n")
    outcome = run(capsys, *arguments(files))
    assert outcome.code == cli.USAGE
    assert "users.csv:4: time='oops' is no number" in outcome.stderr


def test_without_an_slo_there_is_nothing_to_hold_users_to(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "fleet.toml").write_text("[fleet.engine]\nmax_num_seqs = 8\n")
    outcome = run(capsys, *arguments(files))
    assert outcome.code == cli.USAGE
    assert "fleet.slo.ttft_s and fleet.slo.tpot_s are both missing" in outcome.stderr


def test_the_example_is_a_trace_that_it_takes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", "--example-trace", "--peak", "1", "--seed", "4"]) == cli.OK
    (files / "users.jsonl").write_text(capsys.readouterr().out)
    settings = ["--settings", str(files / "fleet.toml"), "--hours", "0.02"]
    assert cli.run(["simulate", "--trace", str(files / "users.jsonl"), *settings]) == cli.OK
