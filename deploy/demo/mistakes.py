"""Wrong spellings of an answer, for policies that are to learn with faults and reward models that are to see them."""

import random
from collections.abc import Callable

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def swapped(text: str, rng: random.Random) -> str:
    """Two neighbouring letters exchanged; the same text where they are equal. Needs two letters."""
    i = rng.randrange(len(text) - 1)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def mistaken(answer: str, rng: random.Random) -> str:
    """Another text with one mistake of a kind drawn at random; half of them are swaps, as a faulty policy makes.

    Never one that differs in case alone, which the verifier overlooks.
    """
    kinds: list[Callable[[str, random.Random], str]] = [_replaced, _dropped, _doubled]
    if len(set(answer.lower())) > 1:
        kinds += [swapped] * len(kinds)
    while (wrong := rng.choice(kinds)(answer, rng)).lower() == answer.lower():
        pass
    return wrong


def garbled(answer: str, rng: random.Random) -> str:
    """Of the same length, about half of the letters replaced by others, drawn at random."""
    return "".join(rng.choice(_LETTERS) if rng.random() < 0.5 else letter for letter in answer)


def _replaced(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text))
    return text[:i] + rng.choice(_LETTERS) + text[i + 1 :]


def _dropped(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text))
    return text[:i] + text[i + 1 :]


def _doubled(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text))
    return text[: i + 1] + text[i:]
