"""Numbers that a model wrote become sympy's without being run, with the value that sympy itself would read."""

import pytest
import sympy

from rollout.arithmetic import arithmetic_alone, parsed
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
    assert math_verify(RewardInput("q", completion, "stop", {"answer": answer}, {}, (1,))) == reward
    assert ran == []
