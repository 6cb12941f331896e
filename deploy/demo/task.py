"""The demo's task: reasoning-gym's `spell_backward` as JSONL prompts, with a held-out split that nothing trains on."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DATASET = "spell_backward"
REWARD = "reasoning_gym"
REWARD_PARAMS = {"dataset": DATASET, "threshold": 0.999, "require_stop": True}
"""One wrong letter scores 0.67 in reasoning-gym: only the whole word counts here."""
MAX_NEW_TOKENS = 13
"""The longest word has ten letters, then comes the end token."""

WARMUP_SEED = 0
TRAIN_SEED = 10_000_000
GATE_SEED = 20_000_000
HELD_OUT_SEED = 30_000_000
"""Items come from Random(seed + index), so splits need seeds further apart than they are long."""
HELD_OUT_SIZE = 256
GATE_SIZE = 256

Entry = dict[str, Any]
"""A reasoning-gym item: question, answer, metadata."""


def entries(seed: int, size: int, *, exclude: Iterable[str] = ()) -> list[Entry]:
    """Up to `size` items with distinct questions, none of them in `exclude`."""
    import reasoning_gym

    seen = set(exclude)
    kept: list[Entry] = []
    for entry in reasoning_gym.create_dataset(DATASET, seed=seed, size=size):
        if entry["question"] not in seen:
            seen.add(entry["question"])
            kept.append(entry)
    return kept


def held_out() -> list[Entry]:
    """The evaluation split."""
    return entries(HELD_OUT_SEED, HELD_OUT_SIZE)


def questions(split: Iterable[Entry]) -> set[str]:
    """What another split must exclude."""
    return {entry["question"] for entry in split}


def prompt_of(entry: Entry) -> str:
    """`"doorlike ->\\n"`; the completion that scores is the word backward and the end token."""
    return f"{entry['metadata']['word']} ->\n"


def write_jsonl(path: Path, split: Sequence[Entry]) -> None:
    """One line a prompt; the keys besides `prompt` reach the reward function as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for entry in split:
            file.write(json.dumps({"prompt": prompt_of(entry), "answer": entry["answer"], "entry": entry}) + "\n")


def write_splits(directory: Path, *, train_size: int, eval_size: int = HELD_OUT_SIZE) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl`; returns their paths. The train split excludes the held-out questions."""
    evaluation = held_out()
    train = entries(TRAIN_SEED, train_size, exclude=questions(evaluation))
    write_jsonl(directory / "train.jsonl", train)
    write_jsonl(directory / "eval.jsonl", evaluation[:eval_size])
    return directory / "train.jsonl", directory / "eval.jsonl"
