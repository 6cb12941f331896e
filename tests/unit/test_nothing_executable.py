"""Nothing that is shipped runs what others wrote, unpickles, starts a shell, or opens a door to every machine.

Each rule looks at one node of the syntax tree and says what is wrong with it; each is shown to find its bad samples.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("rollout", "services", "trainer", "deploy")
Rule = Callable[[ast.AST], str | None]

UNPICKLING = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
RUNNING = frozenset({"eval", "exec", "compile"})
CALLS = frozenset({
    "torch.load", "pandas.read_pickle", "pd.read_pickle", "yaml.load", "yaml.full_load", "yaml.unsafe_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
})  # fmt: skip
"""Of which there is a harmless one: safetensors, yaml.safe_load, subprocess with a list."""
OBJECTS_BY_PICKLE = frozenset({
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
})  # fmt: skip
KEYWORDS = {"weights_only": False, "allow_pickle": True, "shell": True}
EVERY_MACHINE = frozenset({"0.0.0.0", "::"})


def imports_what_unpickles(node: ast.AST) -> str | None:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__"):
        names = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    found = [name for name in names if name.split(".")[0] in UNPICKLING]
    return f"imports {', '.join(found)}" if found else None


def runs_text(node: ast.AST) -> str | None:
    """Named or called: a name can be handed on."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in RUNNING:
        return f"names {node.id}"
    named = isinstance(node, ast.Attribute) and node.attr in RUNNING and dotted(node.value) == "builtins"
    return f"names {dotted(node)}" if named else None


def calls_what_runs_what_it_reads(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute | ast.Name) and dotted(node) in CALLS:
        return f"names {dotted(node)}"
    if isinstance(node, ast.ImportFrom):
        found = [name for alias in node.names if (name := f"{node.module}.{alias.name}") in CALLS]
        return f"imports {', '.join(found)}" if found else None
    return None


def sends_objects(node: ast.AST) -> str | None:
    return f"names {node.attr}" if isinstance(node, ast.Attribute) and node.attr in OBJECTS_BY_PICKLE else None


def gives_a_dangerous_keyword(node: ast.AST) -> str | None:
    if not isinstance(node, ast.keyword) or node.arg not in KEYWORDS:
        return None
    value = node.value.value if isinstance(node.value, ast.Constant) else None
    harmless = isinstance(value, bool) and value is not KEYWORDS[node.arg]
    return None if harmless else f"gives {node.arg}={ast.unparse(node.value)}"


def names_every_address(node: ast.AST) -> str | None:
    found = isinstance(node, ast.Constant) and node.value in EVERY_MACHINE
    return f"has the literal {ast.unparse(node)}; ask ipaddress.ip_address(...).is_unspecified" if found else None


def loads_a_model_that_may_bring_code(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] != "from_pretrained":
        return None
    given = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
    harmless = any(isinstance(value, ast.Constant) and value.value is False for value in given)
    return None if harmless else f"calls {dotted(node.func)} without trust_remote_code=False"


BAD: Mapping[Rule, tuple[str, ...]] = {
    imports_what_unpickles: (
        "import pickle",
        "import os, cloudpickle as cp",
        "from dill import loads",
        "from joblib.numpy_pickle import load",
        "def f():\n    import marshal",
        "importlib.import_module('shelve')",
        "__import__('_pickle')",
    ),
    runs_text: (
        "eval(text)",
        "exec(text, {})",
        "compile(text, '', 'exec')",
        "list(map(eval, texts))",
        "builtins.eval(t)",
    ),
    calls_what_runs_what_it_reads: (
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "pd.read_pickle(path)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "os.system('ls')",
        "os.popen('ls')",
        "from os import system",
        "from torch import load as fetch",
        "run = subprocess.getoutput",
    ),
    sends_objects: ("dist.all_gather_object(out, mine)", "torch.distributed.broadcast_object_list(items)"),
    gives_a_dangerous_keyword: (
        "load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=trusted)",
        "subprocess.run('ls', shell=True)",
        "subprocess.Popen(command, shell=1)",
    ),
    names_every_address: ("serve.start(host='0.0.0.0')", "HOSTS = ['::']"),
    loads_a_model_that_may_bring_code: (
        "AutoModel.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusted)",
        "auto.from_pretrained(path, **local)",
    ),
}
GOOD = """
import json, yaml, subprocess, ipaddress
from torch import nn
model.eval()
re.compile("a")
engine.compile
def load(path): "never pickle or eval; listens on 0.0.0.0"
safetensors.torch.load_file(path)
yaml.safe_load(text)
np.load(path, allow_pickle=False)
np.load(path)
subprocess.run(["ls"], shell=False)
dist.broadcast(tensor, 0)
AutoModel.from_pretrained(path, trust_remote_code=False)
ipaddress.ip_address(host).is_unspecified
"""


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; of anything else the last attribute behind a dot."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def found(rule: Rule, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if what := rule(node):
            yield f"{getattr(node, 'lineno', '?')} {what}"


@pytest.fixture(scope="module")
def shipped() -> dict[Path, list[ast.AST]]:
    files = [file for package in SHIPPED for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT): nodes(file.read_text()) for file in files}


@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.__name__)
def test_no_shipped_module_breaks_the_rule(rule: Rule, shipped: dict[Path, list[ast.AST]]) -> None:
    assert len(shipped) > 200
    assert [f"{file}:{what}" for file, inside in shipped.items() for what in found(rule, inside)] == []


@pytest.mark.parametrize(("rule", "sample"), [(rule, sample) for rule, samples in BAD.items() for sample in samples])
def test_the_rule_finds_what_it_is_for(rule: Rule, sample: str) -> None:
    assert list(found(rule, nodes(sample)))


@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.__name__)
def test_the_rule_finds_nothing_in_what_is_harmless(rule: Rule) -> None:
    assert list(found(rule, nodes(GOOD))) == []
