"""The demo's pure parts: splits, timings, goals, metrics reading, the tokenizer and the configuration it writes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.directory import claim_directory
from deploy.demo.goals import PLAIN, Learning, judge, of_recipe
from deploy.demo.observer import Observer
from deploy.demo.options import DemoOptions
from deploy.demo.plot import draw
from deploy.demo.policy import CLEAN, FAULTY, Warmup, build_tokenizer, gate_opens
from deploy.demo.report import gap
from deploy.demo.score import Score
from deploy.demo.task import TRAIN_SEED, WARMUP_SEED, entries, held_out, prompt_of, questions, write_splits
from deploy.demo.traffic import WITH, WITHOUT, Timing, summary, timing
from rollout.errors import ConfigError
from rollout.rewards import RewardInput, reasoning_gym


def test_held_out_questions_are_in_no_other_split(tmp_path: Path) -> None:
    train, evaluation = write_splits(tmp_path, train_size=500)
    held = {json.loads(line)["prompt"] for line in evaluation.read_text().splitlines()}
    assert held == {prompt_of(e) for e in held_out()}
    assert held.isdisjoint(json.loads(line)["prompt"] for line in train.read_text().splitlines())
    for seed in (WARMUP_SEED, TRAIN_SEED):
        assert questions(held_out()).isdisjoint(questions(entries(seed, 500, exclude=questions(held_out()))))


@pytest.mark.parametrize(
    ("completion", "finish", "reward"), [("ekilrood", "stop", 1), ("ekilrodo", "stop", 0), ("ekilrood", "length", 0)]
)
def test_only_the_whole_word_with_its_end_scores(completion: str, finish: str, reward: float) -> None:
    metadata = {
        "answer": "ekilrood",
        "entry": {"question": "q", "answer": "ekilrood", "metadata": {"word": "doorlike"}},
    }
    params = {"dataset": "spell_backward", "threshold": 0.999, "require_stop": True}
    sample = RewardInput("doorlike ->\n", completion, finish, metadata, params, ())
    assert reasoning_gym(sample) == reward


def test_tokenizer_gives_back_every_printable_character() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "doorlike ->"}], tokenize=False)
    assert chat == "doorlike ->\n"


@pytest.mark.parametrize(
    ("warmup", "greedy", "sampled", "opens"),
    [
        (FAULTY, 0.93, 0.43, True),
        (FAULTY, 0.80, 0.43, False),
        (FAULTY, 0.93, 0.55, False),
        (FAULTY, 0.93, 0.2, False),
        (CLEAN, 0.55, 0.30, True),
        (CLEAN, 0.40, 0.30, False),
        (CLEAN, 0.70, 0.30, False),
        (CLEAN, 0.55, 0.50, False),
        (CLEAN, 0.55, 0.20, False),
    ],
)
def test_warm_up_gate_wants_both_figures(warmup: Warmup, greedy: float, sampled: float, opens: bool) -> None:
    assert gate_opens(Score(greedy, sampled, 256, 2), warmup) is opens


def test_the_clean_warm_up_has_no_faulty_target() -> None:
    assert CLEAN.faulty == 0
    assert CLEAN.digest != FAULTY.digest


def test_warm_up_digest_follows_every_field() -> None:
    assert Warmup().digest == Warmup().digest
    assert Warmup(steps=301).digest != Warmup().digest


def test_timing_of_a_stream() -> None:
    measured = timing(WITH, 100.0, 10.0, [10.5, 10.6, 11.0], tokens=6)
    assert measured.ttft_s == pytest.approx(0.5)
    assert measured.tpot_s == pytest.approx(0.1)
    assert measured.longest_gap_s == pytest.approx(0.5)


def test_summary_counts_failures_apart_and_phases_by_themselves() -> None:
    timings = [
        Timing(WITHOUT, 0.0, 0.1, 0.01, 0.1, 5),
        Timing(WITH, 1.0, 0.2, 0.02, 0.2, 5),
        Timing(WITH, 2.0, 0.4, None, 0.4, 1),
        Timing(WITH, 3.0, 0.0, None, 0.0, 0, "ConnectError: gone"),
    ]
    found = summary(timings, WITH)
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, ["ConnectError: gone"])
    assert found["ttft_s"]["p50"] == pytest.approx(0.3)
    assert found["tpot_s"]["p50"] == pytest.approx(0.02)
    assert summary([], WITHOUT)["ttft_s"] == {"p50": None, "p95": None}


def _checkpoint(sampled_gap: float | None) -> dict[str, Any]:
    return {"greedy_gap": 0.0, "sampled_gap": sampled_gap, "sampled": 0.5, "prompts": 256, "samples": 2}


def _report(**changes: Any) -> dict[str, Any]:
    users = {"requests": 5, "failed": 0}
    return {
        "steps": 50,
        "verified_versions": 51,
        "largest_canary_gap": 0.001,
        "unverified_pushes": 0,
        "missing_pushes": 0,
        "collective_share": 0.9,
        "failed_evaluation_groups": 0,
        "wall_s": {"total": 400.0},
        "ledger": {"balance": 0},
        "ledger_is_audit": True,
        "lost": 0,
        "users": {"with_rollouts": users},
        "peak_memory_gib": 9.0,
        "checkpoint": _checkpoint(0.01),
        "reward_before": {"sampled": 0.43, "greedy": 0.92},
        "reward_after": {"sampled": 0.95, "greedy": 1.0},
        "replicas_seen": ["a", "b"],
        **changes,
    }


def _missed(report: dict[str, Any], learning: Learning = PLAIN) -> list[str]:
    return [goal.name for goal in judge(report, max_replicas=2, learning=learning) if not goal.met]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"reward_before": {"sampled": 0.51}}, ["reward_before"]),
        ({"reward_after": {"sampled": 0.89}}, ["reward_after"]),
        ({"reward_after": {"sampled": None}}, ["reward_after"]),
        ({"replicas_seen": ["a"]}, ["replicas_seen"]),
        ({"reward_after": None}, ["reward_after"]),
        ({"verified_versions": 19}, ["verified_versions"]),
        ({"unverified_pushes": 1}, ["unverified_pushes"]),
        ({"missing_pushes": 1}, ["missing_pushes"]),
        ({"collective_share": 0.0}, ["collective_share"]),
        ({"collective_share": None}, []),
        ({"wall_s": {"total": 481.0}}, ["wall_s"]),
        ({"steps": 51, "wall_s": {"total": 481.0}}, []),
        ({"failed_evaluation_groups": 1}, ["failed_evaluation_groups"]),
        ({"checkpoint": _checkpoint(0.031)}, ["checkpoint_sampled_gap"]),
        ({"checkpoint": _checkpoint(None)}, ["checkpoint_sampled_gap"]),
        ({"steps": 6, "checkpoint": _checkpoint(0.08)}, []),
        ({"steps": 6, "checkpoint": _checkpoint(0.2)}, ["checkpoint_sampled_gap"]),
        ({"largest_canary_gap": 0.06}, ["largest_canary_gap"]),
        ({"largest_canary_gap": None}, ["largest_canary_gap"]),
        ({"ledger": {"balance": 1}}, ["ledger_balance"]),
        ({"lost": 1}, ["lost_groups"]),
        ({"peak_memory_gib": 14.5}, ["peak_memory_gib"]),
        ({"steps": 6, "verified_versions": 7, "reward_after": {"sampled": 0.5}, "replicas_seen": ["a"]}, []),
        ({"steps": 6, "verified_versions": 5}, ["verified_versions"]),
    ],
)
def test_goals_name_what_was_missed(changes: dict[str, Any], missed: list[str]) -> None:
    assert _missed(_report(**changes)) == missed


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"reward_before": {"sampled": 0.6, "greedy": 0.4}, "reward_after": {"sampled": 0.75, "greedy": 0.6}}, []),
        ({"reward_after": {"sampled": 0.44, "greedy": 0.6}}, ["reward_rise"]),
        ({"reward_after": {"sampled": 0.5, "greedy": 0.54}}, ["greedy_rise"]),
        ({"reward_after": {"sampled": 0.5, "greedy": None}}, ["greedy_rise"]),
        ({"reward_after": None}, ["reward_rise", "greedy_rise"]),
        ({"wall_s": {"total": 901.0}}, ["wall_s"]),
        ({"steps": 79, "reward_after": None, "replicas_seen": []}, []),
        ({"checkpoint": _checkpoint(0.05)}, []),
        ({"peak_memory_gib": 14.5}, ["peak_memory_gib"]),
    ],
)
def test_a_run_by_a_recipe_is_judged_by_how_far_the_reward_rises(changes: dict[str, Any], missed: list[str]) -> None:
    ends = {"reward_before": {"sampled": 0.3, "greedy": 0.4}, "reward_after": {"sampled": 0.5, "greedy": 0.6}}
    report = _report(**{"steps": 80, "wall_s": {"total": 880.0}, **ends, **changes})
    assert _missed(report, of_recipe(DemoOptions(greedy_rise=0.15), 80)) == missed


def test_a_recipe_without_a_greedy_goal_is_judged_by_samples_alone() -> None:
    ends = {"reward_before": {"sampled": 0.3, "greedy": 0.9}, "reward_after": {"sampled": 0.5, "greedy": 0.9}}
    assert _missed(_report(**ends), of_recipe(DemoOptions(), 50)) == []


def test_report_has_no_gap_where_the_engines_reward_is_unknown() -> None:
    assert gap(0.5, None, "greedy") is None
    assert gap(0.5, {"greedy": None}, "greedy") is None
    assert gap(0.5, {"greedy": 0.75}, "greedy") == 0.25


def test_picture_is_drawn_without_a_last_evaluation(tmp_path: Path) -> None:
    report = {"reward_per_step": [0.4, 0.5], "reward_before": {"sampled": 0.4}, "reward_after": None}
    draw(tmp_path / "report.png", report, [], [])
    assert (tmp_path / "report.png").stat().st_size > 0


_NOISY = """
import os, subprocess, sys
from pathlib import Path
from deploy.demo.terminal import own_terminal
try:
    with own_terminal(Path(sys.argv[1])) as terminal:
        print("from a library")
        os.write(2, b"from native code\\n")
        subprocess.run(["sh", "-c", "echo from a child"], check=True)
        terminal.write("for the user\\n")
        raise KeyError
except KeyError:
    print("afterwards", file=sys.stderr)
"""


def test_terminal_shows_only_what_the_demo_says(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    command = [sys.executable, "-c", _NOISY, str(log)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert (shown.stdout, shown.stderr) == ("for the user\n", "afterwards\n")
    assert sorted(log.read_text().splitlines()) == ["from a child", "from a library", "from native code"]


class _NoReplicas:
    async def replicas(self, _fleet: str) -> list[Any]:
        return []


async def test_observer_reads_whole_lines_and_keeps_the_last_of_a_repeated_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    observer = Observer(_NoReplicas(), "demo", metrics)  # type: ignore[arg-type]
    await observer.look()
    assert observer.steps == []
    metrics.write_text('{"step": 1, "time": 9e9, "reward_mean": 0.4}\n{"step": 2, "time": 9e9, "rew')
    await observer.look()
    assert [s["step"] for s in observer.steps] == [1]
    with metrics.open("a") as file:
        file.write('ard_mean": 0.5}\n{"step": 2, "time": 9e9, "reward_mean": 0.6}\n')
    await observer.look()
    assert [(s["step"], s["reward_mean"]) for s in observer.steps] == [(1, 0.4), (2, 0.6)]


def test_a_fresh_demo_empties_what_an_earlier_one_wrote_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    claim_directory(directory, resume=False).close()
    (directory / "weights").mkdir()
    (directory / "report.json").write_text("{}")
    claim_directory(directory, resume=True).close()
    assert (directory / "report.json").exists()
    claim_directory(directory, resume=False).close()
    assert [path.name for path in directory.iterdir()] == [".nightshift-demo"]


def test_a_directory_is_refused_while_a_demo_runs_there_or_when_none_wrote_it(tmp_path: Path) -> None:
    directory, other = tmp_path / "demo", tmp_path / "mine"
    with claim_directory(directory, resume=False):
        (directory / "report.json").write_text("{}")
        with pytest.raises(ConfigError, match="a demo is running there"):
            claim_directory(directory, resume=False)
        assert (directory / "report.json").exists()
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="was not written by a demo"):
        claim_directory(other, resume=False)
    with pytest.raises(ConfigError, match="holds no demo"):
        claim_directory(tmp_path / "absent", resume=True)
