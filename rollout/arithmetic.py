"""Arithmetic that a model wrote, as sympy's numbers: sympy's own parser runs text as Python.

"2 + 3/4" -> Add(2, Mul(3, Pow(4, -1)))        "__import__('os')", "x", "sqrt(2)" -> SyntaxError
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PARSERS = ("sympy.parsing.sympy_parser", "math_verify.parser", "latex2sympy2_extended.latex2sympy2")
"""Modules whose `parse_expr` is called: by sympy for every text that is to become a number, by math-verify for answers
that are no LaTeX."""


@contextmanager
def arithmetic_alone() -> Iterator[None]:
    """Meanwhile text becomes a sympy expression by `parsed` alone, whoever asks in this process."""
    modules = [importlib.import_module(name) for name in _PARSERS]
    formers: list[Any] = [vars(module)["parse_expr"] for module in modules]
    try:
        for module in modules:
            vars(module)["parse_expr"] = parsed
        yield
    finally:
        for module, former in zip(modules, formers, strict=True):
            vars(module)["parse_expr"] = former


def parsed(text: str, *_: object, evaluate: bool = True, **__: object) -> Any:
    """Numbers, + - * / ** and brackets, called as `sympy.parse_expr` is. Raises SyntaxError for anything else, which
    sympy takes for text without a meaning."""
    source = text.strip()
    if not source.isascii():
        raise SyntaxError("arithmetic is ASCII")
    try:
        return _value(ast.parse(source, mode="eval").body, source, evaluate)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"no arithmetic: {error!r:.80}") from error


def _value(node: ast.expr, source: str, evaluate: bool) -> Any:
    import sympy

    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return sympy.Integer(number)
        case ast.Constant(value=float()):
            return sympy.Float(ast.get_source_segment(source, node))  # to as many digits as were written
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source, evaluate)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source, evaluate)
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(_value(left, source, evaluate), operator, _value(right, source, evaluate), evaluate)
    raise SyntaxError(f"no arithmetic: {type(node).__name__}")


def _combined(left: Any, operator: ast.operator, right: Any, evaluate: bool) -> Any:
    import sympy

    match operator:
        case ast.Add():
            return sympy.Add(left, right, evaluate=evaluate)
        case ast.Sub():
            return sympy.Add(left, sympy.Mul(-1, right, evaluate=evaluate), evaluate=evaluate)
        case ast.Mult():
            return sympy.Mul(left, right, evaluate=evaluate)
        case ast.Div():
            return sympy.Mul(left, sympy.Pow(right, -1, evaluate=evaluate), evaluate=evaluate)
        case ast.Pow():
            return sympy.Pow(left, right, evaluate=evaluate)
    raise SyntaxError(f"no arithmetic: {type(operator).__name__}")
