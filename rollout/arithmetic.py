"""Mathematics that a model wrote, with sympy, and without running any of it: sympy has two ways from text to Python.

Its parser evaluates what it reads, and `lambdify`, by which infinite sums and roots of polynomials become numbers, runs
an expression in which the names of symbols and functions are what the model called them.

    "2 + 3/4" -> Add(2, Mul(3, Pow(4, -1)))        "__import__('os')", "x", "sqrt(2)" -> SyntaxError
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

_LIBRARIES = ("sympy", "math_verify", "latex2sympy2_extended")


@contextmanager
def arithmetic_alone() -> Iterator[None]:
    """Meanwhile text becomes a sympy expression by `parsed` alone and an expression a function of Python by `_function`
    alone, whoever asks in this process."""
    import math_verify.parser  # noqa: F401  so that it is among the modules whose names change
    import sympy.utilities
    from sympy.parsing.sympy_parser import parse_expr

    former: dict[str, Any] = {"parse_expr": parse_expr, "lambdify": sympy.utilities.lambdify}
    guarded: dict[str, Any] = {"parse_expr": parsed, "lambdify": partial(_function, former["lambdify"])}
    _exchange(former, guarded)
    try:
        yield
    finally:
        _exchange(guarded, former)  # in modules that were imported meanwhile, too


def _exchange(here: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in _LIBRARIES]:
        for name in here:
            if vars(module).get(name) is here[name]:
                setattr(module, name, then[name])


def _function(lambdify: Callable[..., Any], arguments: Any, expression: Any, *more: Any, **options: Any) -> Any:
    """What `lambdify` makes of sums, products and powers of numbers and its arguments. Raises ValueError for an
    expression with any other name in it."""
    from sympy import Add, Mul, Number, NumberSymbol, Pow, Symbol, preorder_traversal

    own = [arguments] if isinstance(arguments, Symbol) else list(arguments)
    for part in preorder_traversal(expression):
        if not isinstance(part, Add | Mul | Pow | Number | NumberSymbol) and part not in own:
            raise ValueError(f"{expression!s:.80} holds more than numbers and {own!s:.80}")
    return lambdify(arguments, expression, *more, **options)


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
