"""What the demo's reward model learns from, and the gate it has to pass."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.demo.mistakes import mistaken, swapped
from deploy.demo.policy import build_tokenizer
from deploy.demo.reward_model import Discrimination, RewardTraining, discrimination, gate_opens, made_up
from deploy.demo.task import GATE_SEED, entries, prompt_of

WORDS = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=10)


@given(WORDS, st.integers())
def test_a_mistake_never_leaves_the_answer_right(answer: str, seed: int) -> None:
    wrong = mistaken(answer, random.Random(seed))
    assert wrong.lower() != answer.lower()
    assert abs(len(wrong) - len(answer)) <= 1


@given(WORDS.filter(lambda word: len(word) > 1), st.integers())
def test_a_swap_keeps_the_letters(answer: str, seed: int) -> None:
    assert sorted(swapped(answer, random.Random(seed))) == sorted(answer)


@pytest.mark.parametrize(
    ("auc", "right", "wrong", "opens"),
    [(0.99, 0.9, 0.1, True), (0.94, 0.9, 0.1, False), (0.99, 0.5, 0.1, False), (0.99, 0.1, 0.9, False)],
)
def test_the_gate_wants_order_and_distance(auc: float, right: float, wrong: float, opens: bool) -> None:
    assert gate_opens(Discrimination(auc, right, wrong, 100, 100), RewardTraining()) is opens


def test_the_auc_counts_pairs_in_order_and_ties_half() -> None:
    found = discrimination([0.9, 0.4, 0.4, 0.1], [1, 1, 0, 0])
    assert found.auc == pytest.approx(3.5 / 4)
    assert (found.right, found.wrong) == (2, 2)
    assert (found.right_mean, found.wrong_mean) == pytest.approx((0.65, 0.25))
    assert discrimination([0.1, 0.9], [1, 0]).auc == 0


def test_made_up_answers_are_judged_by_letter_and_at_their_end() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    (entry,) = entries(GATE_SEED, 1)
    prompt = tokenizer(prompt_of(entry))["input_ids"]
    right = [*tokenizer(entry["answer"])["input_ids"], tokenizer.eos_token_id]
    ends = set()
    for _ in range(100):
        ids, targets = made_up(tokenizer, entry, rng, RewardTraining())
        answer, learnt = ids[len(prompt) :], targets[len(prompt) :]
        assert targets[: len(prompt)] == [-1.0] * len(prompt)
        assert learnt[:-1] == [float(answer[t] == right[t]) for t in range(len(answer) - 1)]
        assert learnt[-1] == float(answer == right)
        ends.add(learnt[-1])
    assert ends == {0.0, 1.0}
