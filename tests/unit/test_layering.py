"""Who may import whom; every import statement counts, also those inside functions and TYPE_CHECKING blocks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ("rollout", "services", "trainer", "deploy")
FRAMEWORKS = ("torch", "ray", "vllm", "deepspeed", "transformers")
ALLOWED = {
    "rollout": {"rollout"},
    "services": {"services", "rollout"},
    "trainer": {"trainer", "rollout"},
    "deploy": {"deploy", "services", "trainer", "rollout"},
}
IMPORTERS = {
    "redis": {"rollout/redis_store.py"},
    "vllm": {
        "services/vllm_engine.py",
        *(f"services/{name}.py" for name in ("patient_reads", "users_first", "weights_ahead", "worker_extension")),
    },
    "deepspeed": {"trainer/zero.py"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant):
                yield str(target.value), node.lineno


def top(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


@pytest.mark.parametrize("package", OWN)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in modules(package)
        for name, line in imported(file)
        if top(name) in {*OWN, "tests"} and top(name) not in ALLOWED[package]
    ]
    assert not wrong


def test_the_rollout_layer_imports_no_framework() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in modules("rollout")
        for name, line in imported(file)
        if top(name) in FRAMEWORKS
    ]
    assert not wrong


@pytest.mark.parametrize("library", sorted(IMPORTERS))
def test_a_technology_is_imported_where_it_is_wrapped_and_nowhere_else(library: str) -> None:
    found = {
        str(file.relative_to(ROOT))
        for package in OWN
        for file in modules(package)
        for name, _ in imported(file)
        if top(name) == library
    }
    assert found <= IMPORTERS[library]
