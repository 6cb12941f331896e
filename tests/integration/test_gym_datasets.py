"""Only datasets of reasoning-gym whose scorers run nothing that was written to them may score: by the source of the
installed version, and by what their scorers do with text that asks to be run."""

import json
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from rollout.errors import RewardError
from rollout.gym_datasets import READ_VERSION, SCORING
from rollout.rewards import RewardInput, reasoning_gym
from tests.gym_scorers import Library

ROOT = Path(__file__).resolve().parents[2]
BASE = "class Base:\n    def score_answer(self, answer, entry):\n        return float(answer == entry['answer'])\n"
SAMPLES = {
    "equal": "class D(Base): ...",
    "generated": "class D(Base):\n    def __getitem__(self, i): return eval('1')",
    "parsed": "import json\nclass D(Base):\n    def score_answer(self, a, entry): return json.loads(a) == entry",
    "own_names": "class D(Base):\n    def score_answer(self, a, dir, input=1): return [id for id in a] == dir == input",
}
BAD_SAMPLES = {
    "eval": ("class D(Base):\n    def score_answer(self, a, entry): return eval(a)", "eval"),
    "helper": ("from .helper import run\nclass D(Base):\n    def score_answer(self, a, entry): return run(a)", "eval"),
    "module": ("from . import helper\nclass D(Base):\n    def score_answer(self, a, e): return helper.run(a)", "eval"),
    "star": ("from .helper import *\nclass D(Base):\n    def score_answer(self, a, e): return run(a)", "eval"),
    "method": (
        "class D(Base):\n    def score_answer(self, a, e): return self.read(a)\n    def read(self, a): return exec(a)",
        "exec",
    ),
    "inherited": ("from .helper import Worse\nclass D(Worse): ...", "eval"),
    "super": (
        "from .helper import Worse\nclass D(Worse):\n    def score_answer(self, *a): return super().score_answer(*a)",
        "eval",
    ),
    "object": (
        "from .helper import Reader\nclass D(Base):\n    def score_answer(self, a, e): return Reader().read(a)",
        "eval",
    ),
    "kept_object": (
        "from .helper import Reader\nclass D(Base):\n    def __init__(self): self.r = Reader()\n"
        "    def score_answer(self, a, e): return self.r.read(a)",
        "eval",
    ),
    "kept_function": (
        "import sympy\nclass D(Base):\n    def __init__(self): self.r = sympy.parse_expr\n"
        "    def score_answer(self, a, e): return self.r(a)",
        "sympy.parse_expr",
    ),
    "class_constant": (
        "class D(Base):\n    read = eval\n    def score_answer(self, a, e): return self.read(a)",
        "eval",
    ),
    "constant": ("READ = eval\nclass D(Base):\n    def score_answer(self, a, e): return READ(a)", "eval"),
    "default": ("class D(Base):\n    def score_answer(self, a, e, eval=eval): return eval(a)", "eval"),
    "inner": ("class D(Base):\n    def score_answer(self, a, e):\n        return (lambda t: compile(t))(a)", "compile"),
    "by_name": ("class D(Base):\n    def score_answer(self, a, e): return getattr(a, e['verb'])()", "getattr"),
    "inside_out": ("class D(Base):\n    def score_answer(self, a, e): return a.__class__.__bases__", ".__bases__"),
    "template": ("class D(Base):\n    def score_answer(self, a, e): return e['answer'].format(a)", ".format"),
    "file": ("import numpy as np\nclass D(Base):\n    def score_answer(self, a, e): return np.load(a)", "numpy.load"),
    "unknown": ("import zss\nclass D(Base):\n    def score_answer(self, a, e): return zss.distance(a)", "zss.distance"),
    "other": (
        "class D(Base):\n    def score_answer(self, a, e): return self.all[e['of']].score_answer(a, e)",
        ".score_answer",
    ),
}
HELPER = (
    "from .base import Base\ndef run(text): return eval(text)\nclass Worse(Base):\n"
    "    def score_answer(self, answer, entry): return run(answer)\n"
    "class Reader:\n    def read(self, text): return eval(text)\n"
)


def library(directory: Path, sample: str) -> Library:
    package = directory / "gym"
    package.mkdir()
    files = {
        "__init__": "from . import sample",
        "base": BASE,
        "helper": HELPER,
        "sample": f"from .base import Base\n{sample}\nregister_dataset('d', D)\n",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return Library.read(package)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_scorer_that_compares_and_counts_is_harmless(name: str, tmp_path: Path) -> None:
    assert library(tmp_path, SAMPLES[name]).findings() == {"d": []}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_what_could_run_text_is_found_however_it_is_reached(name: str, tmp_path: Path) -> None:
    sample, what = BAD_SAMPLES[name]
    found = library(tmp_path, sample).findings()["d"]
    assert what in {finding.split(" ")[1] for finding in found}


def test_the_datasets_that_score_are_those_whose_scorers_are_harmless_in_the_installed_version() -> None:
    assert version("reasoning-gym") == READ_VERSION
    findings = Library.read(Path(str(distribution("reasoning-gym").locate_file("reasoning_gym")))).findings()
    assert {name for name, found in findings.items() if not found} == SCORING
    known_to_evaluate = {"bitwise_arithmetic", "number_sorting", "n_queens", "string_insertion", "spiral_matrix"}
    assert known_to_evaluate | {"binary_matrix", "countdown", "puzzle24", "composite"} <= findings.keys() - SCORING


WATCHED = """
import json, sys
from reasoning_gym.factory import DATASETS, create_dataset, get_score_answer_fn

def spoilt(value, text):
    if isinstance(value, dict):
        return {key: spoilt(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [spoilt(inner, text) for inner in value]
    return text if isinstance(value, str) else value

names, text = json.loads(sys.argv[1])
ran, watching = [], False
def watch(event, arguments):
    if watching and (event in ("exec", "compile", "import", "open") or event.startswith(("os.", "subprocess."))):
        ran.append((name, event))
sys.addaudithook(watch)
for name in names:
    scorer = get_score_answer_fn(name)
    entry = json.loads(json.dumps(create_dataset(name, seed=1, size=1)[0], default=str))
    for watching in (False, True):  # what a scorer imports, it imports in the first round
        for answer in (entry["answer"], text):
            for wanted in (entry, spoilt(entry, text)):
                try:
                    scorer(answer, wanted)
                except Exception:
                    pass
    watching = False
print()
print(json.dumps({"registered": sorted(DATASETS), "ran": ran}))
"""


def test_text_that_asks_to_be_run_is_not_when_a_scorer_has_it_as_answer_or_in_its_entry() -> None:
    job = json.dumps([[*sorted(SCORING), "number_sorting"], "__import__('os').getpid()"])
    run = subprocess.run([sys.executable, "-c", WATCHED, job], capture_output=True, text=True, check=True, cwd=ROOT)
    report = json.loads(run.stdout.splitlines()[-1])
    assert {name for name, _ in report["ran"]} == {"number_sorting"}  # by which the watch is seen to work
    assert set(report["registered"]) >= SCORING


@pytest.mark.parametrize("dataset", ["countdown", "nonsense", ["spell_backward"], None])
def test_a_group_of_another_dataset_is_not_scored_wherever_it_comes_from(dataset: object) -> None:
    entry = {"answer": "__import__('os').abort()", "metadata": {"numbers": [1]}}
    sample = RewardInput("q", entry["answer"], "stop", {"entry": entry}, {"dataset": dataset}, (1,))
    with pytest.raises(RewardError, match=r"params\.dataset: .* is no dataset that scores here"):
        reasoning_gym(sample)


def test_another_version_of_the_library_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.version", lambda name: "9.9.9")
    sample = RewardInput("q", "ab", "stop", {"answer": "ab"}, {"dataset": "ab"}, (1,))  # which nobody scored before
    with pytest.raises(RewardError, match=r"9\.9\.9 is installed.*0\.1\.25"):
        reasoning_gym(sample)
