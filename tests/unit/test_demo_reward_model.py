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


def test_made_up_answers_are_labelled_right_only_whole_and_ended() -> None:
    tokenizer, rng, training = build_tokenizer(), random.Random(0), RewardTraining(unfinished=0.3)
    (entry,) = entries(GATE_SEED, 1)
    whole = tokenizer(prompt_of(entry) + entry["answer"])["input_ids"]
    seen = [made_up(tokenizer, entry, rng, training) for _ in range(200)]
    assert {label for _, label in seen} == {0.0, 1.0}
    for ids, label in seen:
        assert (ids == [*whole, tokenizer.eos_token_id]) is (label == 1.0)
