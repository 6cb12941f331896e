"""`make bench-staleness`: what stale samples cost, by correction.

    python tests/bench/bench_staleness.py [--fresh] [--seeds 3] [--correction tis ...] [--staleness 8 ...]
                                          [--steps 40] [--groups 16] [--lr 3e-4] [--processes 2] [--out runs/bench]

The demo's policy, task and settings, with batches of half the size, through the trainer's own step; samples come from
the weights of exactly `staleness` steps before. Every finished run is a line of staleness.jsonl, and a run that has one
is not done again; `--fresh` starts over. Writes staleness.json and staleness.png, and prints the table.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from environment import machine, versions
from staleness_grid import Record, Setting, belonging, cells, grid, markdown, missing
from staleness_plot import draw
from staleness_run import LAST_STEPS, train

from deploy.demo.display import Display
from deploy.demo.policy import cached_policy
from deploy.demo.task import write_splits
from trainer.algorithm import Correction
from trainer.json_lines import append_line, cut_torn_line, read_lines

_CACHE = Path("runs/.cache")
_CORRECTIONS: tuple[Correction, ...] = ("none", "behavior", "tis", "decoupled")
_STALENESS = (0, 1, 2, 4, 8)
_STEPS = 40
_GROUPS = 16
"""A step; half of the demo's, for the sake of time."""
_LR = 3e-4
"""The demo's."""
_PROMPTS = 1024
_PACKAGES = ("torch", "transformers", "deepspeed")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the runs' processes."""


def main() -> int:
    """Do what is missing of the study, then write what all of it says; returns the exit code."""
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "staleness.jsonl"
    if arguments.fresh:
        lines.unlink(missing_ok=True)
    cut_torn_line(lines)
    with Display() as display:
        try:
            wanted = _study(arguments, lines, display)
        except KeyboardInterrupt:
            display.say(f"interrupted; {lines} keeps the finished runs, the same command does the others")
            return 130
    _report(out, wanted[0], belonging(wanted, read_lines(lines)))
    return 0


def _study(arguments: argparse.Namespace, lines: Path, display: Display) -> list[Setting]:
    """The settings asked for, each of which has its record in `lines` now."""
    display.phase("policy and prompts")
    model = cached_policy(_CACHE, progress=display.update).absolute()
    wanted = _wanted(arguments, model)
    with tempfile.TemporaryDirectory(prefix="ns-bench-") as directory:
        prompts = write_splits(Path(directory), train_size=_PROMPTS)
        _run_missing(wanted, lines, display, model=model, prompts=prompts, processes=arguments.processes)
    return wanted


def _wanted(arguments: argparse.Namespace, model: Path) -> list[Setting]:
    return grid(
        arguments.correction or _CORRECTIONS,
        arguments.staleness or _STALENESS,
        arguments.seeds,
        lr=arguments.lr,
        steps=arguments.steps,
        groups=arguments.groups,
        policy=model.name,
    )


def _run_missing(
    wanted: Sequence[Setting],
    lines: Path,
    display: Display,
    *,
    model: Path,
    prompts: tuple[Path, Path],
    processes: int,
) -> None:
    """Each run's record is appended when it ends. Raises what a run raised."""
    left = missing(wanted, read_lines(lines))
    if not left:
        return
    display.phase("runs")
    display.update(len(wanted) - len(left), len(wanted), "")
    os.environ.update(_ENVIRONMENT)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(left)), mp_context=spawn, initializer=_start_process) as pool:
        try:
            runs = [pool.submit(train, setting, model, prompts) for setting in left]
            for count, run in enumerate(as_completed(runs), start=len(wanted) - len(left) + 1):
                record = run.result()
                append_line(lines, record)
                display.update(count, len(wanted), _said(record))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_process() -> None:
    """One torch thread, and one training group for all runs of a process: DeepSpeed keeps the first that it meets."""
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from trainer.engine import join_group

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted run has nothing to say
    torch.set_num_threads(1)
    join_group(0, 1, HashStore(), device="cpu")


def _said(record: Record) -> str:
    setting = record["setting"]
    name = f"{setting['correction']}, staleness {setting['staleness']}, seed {setting['seed']}"
    return f"{name}: {record['final_reward']:.2f} ({record['seconds']:.0f} s)"


def _report(out: Path, first: Setting, records: Sequence[Record]) -> None:
    found = cells(records)
    figures: dict[str, Any] = {
        "command": sys.argv,
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "lr": first.lr,
        "steps": first.steps,
        "groups": first.groups,
        "policy": first.policy,
        "training_reward_steps": LAST_STEPS,
        "table": [asdict(cell) for cell in found],
        "runs": list(records),
    }
    (out / "staleness.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(out / "staleness.png", found, records)
    print(markdown(found), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correction", action="append", choices=get_args(Correction), help="default all of the study")
    parser.add_argument("--staleness", action="append", type=int, help="in versions; default 0, 1, 2, 4, 8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--groups", type=int, default=_GROUPS, help="a step")
    parser.add_argument("--lr", type=float, default=_LR)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are done")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
