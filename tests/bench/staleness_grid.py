"""Which runs the staleness study consists of, which are missing, and what their results add up to.

    settings --staleness_run.train--> records --cells--> mean and range of the seeds --markdown--> table

A record is a finished run: `{"setting": {...}, "final_reward": ..., "training_reward": ..., ...}`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.algorithm import Correction

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides the result of a run, and so names it."""

    correction: Correction
    staleness: int
    """Versions between the weights that sample and those that are updated."""
    seed: int
    lr: float
    steps: int
    groups: int
    """A step."""
    policy: str
    """Name of the directory it starts from, which holds the digest of how it was made."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one correction and staleness, over their seeds. Rewards are means of a run."""

    correction: str
    staleness: int
    seeds: int
    reward: float
    """Held out, with the final weights: mean over seeds."""
    lowest: float
    highest: float
    training_reward: float
    """Of the last steps' samples, which older weights made: mean over seeds."""
    skipped: int
    """Updates that were not finite and left out, of all seeds."""


def grid(
    corrections: Sequence[Correction],
    stalenesses: Sequence[int],
    seeds: int,
    *,
    lr: float,
    steps: int,
    groups: int,
    policy: str,
) -> list[Setting]:
    """Every run, one seed after the other: a study that was cut short still covers all corrections."""
    return [
        Setting(correction, staleness, seed, lr, steps, groups, policy)
        for seed in range(seeds)
        for staleness in stalenesses
        for correction in corrections
    ]


def missing(wanted: Iterable[Setting], records: Iterable[Record]) -> list[Setting]:
    """Those without a record, in their order."""
    done = [record["setting"] for record in records]
    return [setting for setting in wanted if asdict(setting) not in done]


def belonging(wanted: Iterable[Setting], records: Iterable[Record]) -> list[Record]:
    """The newest record of each setting that has one, in the settings' order."""
    newest = {tuple(sorted(record["setting"].items())): record for record in records}
    keys = [tuple(sorted(asdict(setting).items())) for setting in wanted]
    return [newest[key] for key in keys if key in newest]


def cells(records: Iterable[Record]) -> list[Cell]:
    """One for each correction and staleness that the records have, in their order."""
    together: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        setting = record["setting"]
        together.setdefault((setting["correction"], setting["staleness"]), []).append(record)
    return [_cell(correction, staleness, runs) for (correction, staleness), runs in together.items()]


def _cell(correction: str, staleness: int, runs: Sequence[Record]) -> Cell:
    rewards = [float(run["final_reward"]) for run in runs]
    return Cell(
        correction,
        staleness,
        len(runs),
        reward=sum(rewards) / len(runs),
        lowest=min(rewards),
        highest=max(rewards),
        training_reward=sum(float(run["training_reward"]) for run in runs) / len(runs),
        skipped=sum(int(run["skipped"]) for run in runs),
    )


def markdown(found: Sequence[Cell]) -> str:
    """Corrections down, staleness across; `mean (lowest to highest)` of the held-out rewards in each place."""
    across = sorted({cell.staleness for cell in found})
    places = {(cell.correction, cell.staleness): cell for cell in found}
    lines = ["| `correction` | " + " | ".join(f"k = {k}" for k in across) + " |", "|---" * (len(across) + 1) + "|"]
    for correction in dict.fromkeys(cell.correction for cell in found):
        shown = [_shown(places.get((correction, k))) for k in across]
        lines.append(f"| `{correction}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.reward:.2f} ({cell.lowest:.2f} to {cell.highest:.2f})"
