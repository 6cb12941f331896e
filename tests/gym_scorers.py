"""What the scorers of reasoning-gym can reach, read from their source: no line of them is run.

A scorer is followed from `score_answer` of its class into every function, class and constant that it names, into what
is assigned to the attributes of its own that it reads, and, for a method of anything else, into all methods of that
name in the modules that the dataset's can know. What is on no list below is a finding, so that it is looked at.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HARMLESS_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "chr", "classmethod", "complex", "dict", "divmod", "enumerate", "filter", "float",
    "frozenset", "int", "isinstance", "len", "list", "map", "max", "min", "next", "object", "ord", "pow", "print",
    "property", "range", "reversed", "round", "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple",
    "type", "zip", "AttributeError", "Exception", "IndexError", "KeyError", "NotImplementedError", "RuntimeError",
    "TypeError", "ValueError", "ZeroDivisionError",
})  # fmt: skip
HARMLESS_IMPORTS = frozenset({
    "collections.deque", "copy.deepcopy", "dataclasses.dataclass", "decimal.Decimal", "enum.Enum", "enum.auto",
    "fractions.Fraction", "json.JSONDecodeError", "json.dumps", "json.loads", "math.exp", "math.prod", "numpy.abs",
    "numpy.allclose", "numpy.array", "numpy.empty", "numpy.isclose", "numpy.round", "re.IGNORECASE", "re.compile",
    "re.findall", "re.fullmatch", "re.match", "re.search", "re.split",
})  # fmt: skip
HARMLESS_DUNDERS = frozenset({"__init__", "__new__", "__name__"})
EXECUTING = frozenset({
    "__builtins__", "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "locals",
    "open", "setattr", "vars",
})  # fmt: skip
"""Findings whatever a function calls its own names: a parameter may have one of them by default."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Module:
    """One file."""

    name: str
    tree: ast.Module
    is_package: bool = False

    @cached_property
    def defined(self) -> dict[str, ast.stmt]:
        """Name -> the statement at the top of the module that gives it a value."""
        found: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            if isinstance(statement, Functions | ast.ClassDef):
                found[statement.name] = statement
            elif not isinstance(statement, ast.Import | ast.ImportFrom):
                found |= dict.fromkeys(bound(statement), statement)
        return found

    @cached_property
    def imported(self) -> dict[str, str]:
        """Name -> dotted name of what it stands for; all that a star brings under "*" and the module's name."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                for alias in node.names:
                    here = f"*{source}" if alias.name == "*" else alias.asname or alias.name
                    found[here] = f"{source}.{alias.name}"
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*package, node.module] if node.module else package)


@dataclass(frozen=True, eq=False)
class Place:
    """A part of the source, and what names mean there."""

    module: Module
    node: ast.AST
    chain: "tuple[Class, ...]" = ()
    """What `self` is of: a class, and its bases after it."""
    local: frozenset[str] = frozenset()
    """Names that the function around it binds."""


@dataclass(frozen=True, eq=False)
class Class:
    """One link of a chain of bases."""

    module: Module
    node: ast.ClassDef

    @property
    def methods(self) -> list[Functions]:
        return [statement for statement in self.node.body if isinstance(statement, Functions)]


@dataclass(eq=False)
class Library:
    """All modules of a package by dotted name."""

    modules: Mapping[str, Module]

    @classmethod
    def read(cls, package: Path) -> "Library":
        modules = {}
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = Module(name, ast.parse(file.read_text()), is_package)
        return cls(modules)

    def findings(self) -> dict[str, list[str]]:
        """Of every dataset that the library registers."""
        return {name: Reading(self, place).findings for name, place in self.datasets()}

    def datasets(self) -> Iterator[tuple[str, Place]]:
        """Names and classes, as `register_dataset` is told them."""
        for module in self.modules.values():
            for statement in module.tree.body:
                call = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(call, ast.Call) and _is_name(call.func, "register_dataset"):
                    place = self.meaning(module, ast.unparse(call.args[1]))
                    assert isinstance(place, Place), ast.unparse(call)
                    yield _constant(module, call.args[0]), place

    def meaning(self, module: Module, name: str) -> Place | str | None:
        """Of a name at the top of a module: a part of the library, the dotted name of what is none, or nothing."""
        if (node := module.defined.get(name)) is not None:
            return Place(module, node, self.chain(module, node) if isinstance(node, ast.ClassDef) else ())
        if name in module.imported:
            return self.named(module.imported[name])
        for source in (key[1:] for key in module.imported if key.startswith("*")):
            if source not in self.modules:
                return f"{source}.*"
            if (found := self.meaning(self.modules[source], name)) is not None:
                return found
        return None

    def named(self, dotted: str) -> Place | str:
        module, _, name = dotted.rpartition(".")
        if dotted not in self.modules and module in self.modules:
            return self.meaning(self.modules[module], name) or dotted
        return dotted

    def chain(self, module: Module, node: ast.ClassDef) -> tuple[Class, ...]:
        bases = [self.meaning(module, ast.unparse(base)) for base in node.bases]
        inherited = [base.chain for base in bases if isinstance(base, Place)]
        return (Class(module, node), *(link for chain in inherited for link in chain))

    def known_to(self, module: Module) -> list[Module]:
        """The module and those that it imports by name, and so on."""
        known: dict[str, Module] = {}
        work = [module]
        while work:
            current = work.pop()
            if current.name not in known:
                known[current.name] = current
                dotted = list(current.imported.values())
                names = {*dotted, *(name.rpartition(".")[0] for name in dotted)}
                # the files of packages import all that is beneath them
                work += [m for name in names if (m := self.modules.get(name)) is not None and not m.is_package]
        return list(known.values())


@dataclass(eq=False)
class Reading:
    """Of one scorer."""

    library: Library
    dataset: Place
    findings: list[str] = field(default_factory=list)
    """`module:line what`"""

    def __post_init__(self) -> None:
        known = self.library.known_to(self.dataset.module)
        nodes = [(module, node) for module in known for node in module.defined.values()]
        self._classes = [Class(module, node) for module, node in nodes if isinstance(node, ast.ClassDef)]
        work = _methods("score_answer", self.dataset.chain)[:1]
        seen: set[ast.AST] = set()
        while work:
            place = work.pop()
            if place.node not in seen:
                seen.add(place.node)
                work += self._reached(place)

    def _reached(self, place: Place) -> list[Place]:
        local = place.local | bound(place.node)
        return [
            found
            for node in _evaluated(place.node)
            for found in (
                self._attribute(place, node, local)
                if isinstance(node, ast.Attribute)
                else self._name(place, node, local)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                else []
            )
        ]

    def _name(self, place: Place, node: ast.Name, local: frozenset[str]) -> list[Place]:
        if node.id in EXECUTING:
            return self._finding(place, node, node.id)
        if node.id in local:
            return []
        meaning = self.library.meaning(place.module, node.id)
        if isinstance(meaning, Place):
            return [meaning]
        harmless = node.id in HARMLESS_BUILTINS if meaning is None else meaning in HARMLESS_IMPORTS
        return [] if harmless else self._finding(place, node, meaning or node.id)

    def _attribute(self, place: Place, node: ast.Attribute, local: frozenset[str]) -> list[Place]:
        if place.chain and _is_own(node.value):
            return self._own(place, node.attr)
        if (dotted := self._imported(place, node, local)) is not None:
            meaning = self.library.named(dotted)
            if isinstance(meaning, Place):
                return [meaning]
            return [] if dotted in HARMLESS_IMPORTS else self._finding(place, node, dotted)
        owner = self._name(place, node.value, local) if isinstance(node.value, ast.Name) else []
        suspicious = (
            node.attr == "score_answer"  # of the dataset that the entry names
            or (node.attr.startswith("__") and node.attr not in HARMLESS_DUNDERS)
            or (node.attr in ("format", "format_map") and not isinstance(node.value, ast.Constant))
        )
        if suspicious:
            return owner + self._finding(place, node, f".{node.attr}")
        namesakes = [(kind, m) for kind in self._classes for m in kind.methods if m.name == node.attr]
        return owner + [Place(k.module, m, self.library.chain(k.module, k.node)) for k, m in namesakes]

    def _imported(self, place: Place, node: ast.Attribute, local: frozenset[str]) -> str | None:
        """The dotted name of what is taken from an imported module."""
        if not isinstance(node.value, ast.Name) or node.value.id in local:
            return None
        module = self.library.meaning(place.module, node.value.id)
        return f"{module}.{node.attr}" if isinstance(module, str) and module not in HARMLESS_IMPORTS else None

    def _own(self, place: Place, name: str) -> list[Place]:
        """A method of `self`, or what this attribute of it is made of."""
        if methods := _methods(name, place.chain):
            return methods
        return [
            Place(kind.module, part, place.chain, bound(around))
            for kind in place.chain
            for around in (kind.node, *kind.methods)
            for value in _assigned(around, name)
            for part in _given(value)
        ]

    def _finding(self, place: Place, node: ast.expr, what: str) -> list[Place]:
        self.findings.append(f"{place.module.name}:{node.lineno} {what}")
        return []


def bound(node: ast.AST) -> frozenset[str]:
    """Names that are given a value inside: parameters, targets, caught errors, inner functions."""
    return frozenset(_bound(node))


def _bound(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            yield inner.id
        elif isinstance(inner, Functions | ast.ClassDef | ast.ExceptHandler) and inner is not node and inner.name:
            yield inner.name


def _evaluated(root: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, names whose attribute is looked at, and methods that somebody has to name first."""
    work = [root]
    while work:
        node = work.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns") or (isinstance(node, ast.Attribute) and isinstance(value, ast.Name)):
                continue
            below = [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST)]
            work += [part for part in below if not (isinstance(node, ast.ClassDef) and _is_called_by_name(part))]


def _is_called_by_name(part: ast.AST) -> bool:
    return isinstance(part, Functions) and not (part.name.startswith("_") and part.name.endswith("_"))


def _methods(name: str, chain: tuple[Class, ...]) -> list[Place]:
    """The nearest first."""
    return [Place(kind.module, m, chain) for kind in chain for m in kind.methods if m.name == name]


def _assigned(around: ast.AST, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(around):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is_target(target, name) for target in targets):
                yield node.value


def _given(value: ast.expr) -> list[ast.expr]:
    """Without the function of a call, which runs when the dataset is made: its result and what it took are kept."""
    return [*value.args, *(keyword.value for keyword in value.keywords)] if isinstance(value, ast.Call) else [value]


def _is_own(owner: ast.expr) -> bool:
    return _is_name(owner.func, "super") if isinstance(owner, ast.Call) else _is_name(owner, "self", "cls")


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_target(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(_is_target(inner, name) for inner in target.elts)
    if isinstance(target, ast.Attribute):
        return target.attr == name and _is_own(target.value)
    return isinstance(target, ast.Name) and target.id == name


def _constant(module: Module, node: ast.expr) -> str:
    if isinstance(node, ast.Name) and isinstance(assigned := module.defined[node.id], ast.Assign):
        node = assigned.value
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)
