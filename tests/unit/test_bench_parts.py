"""The benches' pure parts, and that what they import exists, which the long run itself should not have to find out."""

import ast
from pathlib import Path
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


@pytest.mark.parametrize("source", sorted(BENCH.glob("*.py")), ids=lambda path: path.name)
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
