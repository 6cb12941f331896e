"""A reward function as a user writes one."""

from rollout.rewards import RewardInput


def share_of_vowels(sample: RewardInput) -> dict[str, float]:
    """How much of the completion is vowels, 0 to 1."""
    letters = [letter for letter in sample.completion.lower() if letter.isalpha()]
    share = sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0
    return {"reward": share, "letters": float(len(letters))}
