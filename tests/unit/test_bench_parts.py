"""The benches' pure parts, and that what they import exists, which the long run itself should not have to find out."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tests" / "bench"
OURS = ("rollout", "services", "trainer", "deploy")


def _defined(source: Path) -> set[str]:
    """Names a module has at its top level, imported ones included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@pytest.mark.parametrize("source", sorted(BENCH.rglob("*.py")), ids=lambda path: path.stem)
def test_benches_import_only_names_that_exist(source: Path) -> None:
    """Imports inside functions too, and without paying for them."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            target = ROOT / Path(*node.module.split("."))
            module = target.with_suffix(".py") if target.with_suffix(".py").exists() else target / "__init__.py"
            submodules = {file.stem for file in target.glob("*.py")}
            assert {alias.name for alias in node.names} <= _defined(module) | submodules, node.module


def test_harvest_bench_uses_the_engine_arguments_of_a_replica(bench: Any) -> None:
    harvest = bench("harvest")
    workload = harvest.Workload("demo", Path("model"), "float32", 4, 8, 13, rounds=1)
    options = harvest.engine_options(workload)
    assert (options["model"], options["max_num_seqs"], options["dtype"]) == ("model", harvest.SEATS, "float32")
    assert options["logprobs_mode"] == "processed_logprobs"


def _steps() -> list[dict[str, Any]]:
    """The first is slow, the last was skipped and published nothing."""
    rows = [(1, 9.0, 9.0, True), (2, 1.0, 0.2, True), (3, 1.2, 0.4, True), (4, 1.1, 0.3, True), (5, 1.1, 0.3, False)]
    return [{"step": n, "update_s": u, "publish_s": p, "applied": a} for n, u, p, a in rows]


def test_training_alone_leaves_the_first_step_out(bench: Any) -> None:
    assert bench("bench_loop").training_s(_steps()) == pytest.approx(1.4)


def test_push_clock_starts_at_publish(bench: Any) -> None:
    pushes = [{"step": n, "seconds": 0.1, "num_bytes": 100} for n in range(5)]
    found = bench("bench_loop").push_figures(_steps(), pushes, [0.1, 0.2, 0.3])
    assert found["seconds"] == pytest.approx(0.4)
    assert found["delivery_s"] == pytest.approx(0.1)
    assert found["ratio"] == pytest.approx(2.0)


def test_ratios_hold_the_peer_on_the_demo_task(bench: Any) -> None:
    ratios = bench("bench_loop").ratios
    figures = {"loop": {"unpinned_step_s": 1.0}, "peer": {"trl_demo": {"median_step_s": 4.0}}}
    assert ratios(figures) == {"our / TRL's s a step, demo policy": 0.25}
    assert ratios({"peer": {"trl_demo": {"missing": "install the extra"}}}) == {}


def test_random_groups_are_the_same_for_the_same_seed_and_fill_a_step(bench: Any) -> None:
    groups_of = bench("random_groups").groups_of
    groups = groups_of(5, n=8, max_tokens=256, vocabulary=100, seed=0)
    segments = [s for g in groups for sample in g.experience.group.samples_G for s in sample.segments]
    assert len(segments) == 40
    assert all(8 <= len(s.prompt_ids_P) <= 64 and 128 <= len(s.response_ids_T) <= 256 for s in segments)
    assert sum(len(s.prompt_ids_P) + len(s.response_ids_T) for s in segments) >= 8000
    again = groups_of(5, n=8, max_tokens=256, vocabulary=100, seed=0)
    assert [g.experience.group.rewards_G for g in groups] == [g.experience.group.rewards_G for g in again]


def test_the_ratio_of_two_loops_is_that_of_neighbouring_steps(bench: Any) -> None:
    figures = bench("trainer_figures")
    # The machine was half as fast in the last round: for both.
    times = [(1.0, 0.9), (1.0, 0.95), (2.0, 2.0)]
    rounds = [figures.Round(figures.Cost(ours, 2.0), figures.Cost(bare, 1.9)) for ours, bare in times]
    found = figures.rates(rounds, tokens=9000)
    assert found["ratio"] == pytest.approx(0.95)
    assert found["ratio_spread"] == pytest.approx(0.1)
    assert found["cpu_ratio"] == pytest.approx(1.9 / 2.0)
    assert (found["trainer_tok_s"], found["bare_tok_s"]) == (pytest.approx(9000), pytest.approx(9000 / 0.95))


def test_flops_of_a_step_count_weights_and_causal_attention_once(bench: Any) -> None:
    shape = SimpleNamespace(hidden_size=4, vocab_size=10, num_hidden_layers=2, num_attention_heads=3, head_dim=5)
    flops = bench("trainer_figures").step_flops(shape, parameters=100, lengths_R=[7, 3], predicted=6)
    assert flops == 6 * (60 * 10 + 40 * 6 + 2 * 3 * 5 * (49 + 9))


def test_utilisation_is_of_the_device_by_its_name_and_unknown_elsewhere(bench: Any) -> None:
    utilisation = bench("trainer_figures").utilisation
    assert utilisation(989e12, 2.0, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert utilisation(756e12, 2.0, "NVIDIA H100 PCIe") == pytest.approx(0.5)
    assert utilisation(1.0, 1.0, "x86_64") is None


def test_the_trainer_bench_names_what_falls_short(bench: Any) -> None:
    figures = bench("trainer_figures")
    same = figures.packing_gap({"loss": 0.5}, {"loss": 0.500001}, "float32")
    apart = figures.packing_gap({"loss": 0.5}, {"loss": 0.51}, "bfloat16")
    refused = {"agree": False, "reason": "the kernel is missing"}
    assert figures.shortfalls({"ratio": 0.91, "packing": None}) == []
    assert figures.shortfalls({"ratio": 0.91, "packing": same}) == []
    (slow,) = figures.shortfalls({"ratio": 0.89, "packing": None})
    assert "0.890" in slow
    assert "0.90" in slow
    assert "0.01 apart" in figures.shortfalls({"ratio": 1.0, "packing": apart})[0]
    assert "the kernel is missing" in figures.shortfalls({"ratio": 1.0, "packing": refused})[0]


def test_gpu_check_loads_neither_ray_nor_vllm_and_says_in_one_line_that_there_is_no_gpu() -> None:
    script = (
        "import runpy, sys\n"
        "sys.modules['ray'] = sys.modules['vllm'] = None  # an import of them fails\n"
        "sys.argv = ['bench_trainer.py', '--device', 'cuda']\n"
        f"runpy.run_path({str(BENCH / 'bench_trainer.py')!r}, run_name='__main__')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCH)]),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "no CUDA device" in line
