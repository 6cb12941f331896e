"""Numbers that a model wrote become sympy's without being run, with the value that sympy itself would read."""

import math_verify as math_verify_library
import pytest
import sympy

from rollout.arithmetic import arithmetic_alone, parsed
from rollout.errors import RewardError
from rollout.rewards import RewardInput, math_verify

NUMBERS = ["7", "-3", "+4", "0.25", ".5", "1e3"]
ARITHMETIC = [*NUMBERS, "2 + 3/4", "2*(3 - 5)", "2**10", "-2**2", "(1 + 2) * 3 - 4/5", " 6 / 4 "]
HOSTILE = [
    "__import__('os').abort()",
    "x",
    "sqrt(2)",
    "2(3)",
    "(1, 2)",
    "[1][0]",
    "1 if 2 else 3",
    "True",
    "1j",
    "'a'*9",
    "7 // 2",
    "1 < 2",
    "(lambda: 1)()",
    "1 +",
    "",
    "٣ + 1",
    "(" * 5000 + "1" + ")" * 5000,
    "9" * 5000,
]


@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("text", ARITHMETIC)
def test_arithmetic_is_what_sympy_would_read(text: str, *, evaluate: bool) -> None:
    found, wanted = parsed(text, evaluate=evaluate), sympy.parse_expr(text, evaluate=evaluate)
    assert found.doit() == wanted.doit()
    if evaluate:
        assert type(found) is type(wanted)


@pytest.mark.parametrize("text", HOSTILE)
def test_anything_else_has_no_meaning(text: str) -> None:
    with pytest.raises(SyntaxError):
        parsed(text)
    with arithmetic_alone(), pytest.raises(sympy.SympifyError):
        sympy.sympify(text)


def test_sympy_reads_text_as_ever_outside() -> None:
    with arithmetic_alone():
        assert sympy.sympify("6/4") == sympy.Rational(3, 2)
    assert sympy.sympify("x + 1") == sympy.Symbol("x") + 1


def test_a_name_that_a_model_chose_is_not_called_when_a_sum_becomes_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr("builtins.f", called.append, raising=False)
    completion, answer = "$\\sum_{n=0}^{\\infty} (f(3))^n/n!$", "$1$"
    assert math_verify(sample(completion, answer)) == 0
    assert called == []
    parsed = [math_verify_library.parse(text, parsing_timeout=None) for text in (answer, completion)]
    math_verify_library.verify(*parsed, timeout_seconds=None)
    assert 3 in called, "what the library does by itself"


def test_functions_of_python_are_made_of_arithmetic_alone() -> None:
    x, y, f = sympy.Symbol("x"), sympy.Symbol("y"), sympy.Function("f")
    free = sympy.utilities.lambdify
    with arithmetic_alone():
        assert sympy.lambdify is sympy.core.evalf.lambdify is not free
        assert sympy.lambdify(x, x**2 + sympy.pi / 2 - 1, "math")(2) == pytest.approx(4.5708, abs=1e-4)
        assert sympy.lambdify([x, y], x - y)(3, 1) == 2
        assert float(sympy.CRootOf(x**5 - x - 1, 0).evalf()) == pytest.approx(1.1673, abs=1e-4)
        for expression in (y, f(x), x * sympy.Symbol("__import__('os').abort()"), sympy.sin(y), sympy.Matrix([y])):
            with pytest.raises(ValueError, match="holds more than numbers"):
                sympy.lambdify(x, expression)
    assert sympy.lambdify is sympy.core.evalf.lambdify is free


def sample(completion: str, answer: str) -> RewardInput:
    return RewardInput("q", completion, "stop", {"answer": answer}, {}, (1,))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The answer is 4", "4", 1),
        ("so it is 1,234.5", "1234.5", 1),
        ("The answer is (1 + 2) * 3", "9", 1),
        ("3/4", "$\\frac{3}{4}$", 1),
        ("2^3", "8", 1),
        ("$\\boxed{\\sqrt{8}}$", "$2\\sqrt{2}$", 1),
        ("$x = 2$", "2", 1),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$", 1),
        ("$2x + 2$", "$2(x + 1)$", 1),
        ("50\\%", "50\\%", 1),
        ("$\\gcd(4, 6)$", "2", 1),
        ("$2\\sqrt{2}$", "2\\sqrt{2}", 1),
        ("2", "2\\sqrt{2}", 0),
        ("$\\boxed{\\frac{\\pi}{2}}$", "\\frac{\\pi}{2}", 1),
        ("$1 + x$", "x+1", 1),
        ("$(1, 2)$", "(1,2)", 1),
        ("so $10^5$", "10^{5}", 1),
        ("1,000 of them", "1,000", 1),
        ("$\\text{Monday}$", "\\text{Monday}", 1),
        ("The answer is 5", "4", 0),
        ("no number", "4", 0),
        ("$\\operatorname{__import__}(2)$", "2", 0),
        ("$__import__('os').abort()$", "2", 0),
        ("__import__('os').abort()", "2", 0),
    ],
)
def test_answers_are_verified_and_none_of_them_is_run(
    completion: str, answer: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr("sympy.parsing.sympy_parser.eval_expr", lambda code, *_: ran.append(code))
    assert math_verify(sample(completion, answer)) == reward
    assert ran == []


@pytest.mark.parametrize("answer", ["", " ", "$$", "\\boxed{}", "it is $"])
def test_an_answer_without_an_expression_is_an_error_not_a_zero(answer: str) -> None:
    with pytest.raises(RewardError, match=r"metadata\[\"answer\"\] holds no mathematical expression"):
        math_verify(sample("The answer is 4", answer))
