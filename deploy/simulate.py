"""`nightshift simulate`: what a fleet would harvest from a trace of users, and what users would feel."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.config import NightshiftConfig, load
from deploy.simulate_arguments import LOAD, PEAK, PUSH_EVERY_S, unread
from deploy.simulation import trace
from deploy.simulation.bench import read_bench
from deploy.simulation.calibration import calibrate
from deploy.simulation.day import TICK_S
from deploy.simulation.engine_model import EngineModel, read_engine
from deploy.simulation.outcome import Outcome, Way, beside_users_alone, read_load, simulate, users_alone, way_for
from deploy.simulation.outcome import Progress as Told
from deploy.simulation.plot import draw
from deploy.simulation.report import as_json, sweep_table, table
from deploy.simulation.scene import Scene
from deploy.simulation.sweep import Choice, choice, variants
from deploy.simulation.users import day_curve
from deploy.simulation.validation import validate, validation_table
from deploy.simulation.work import Training
from rollout.errors import ConfigError

_DAY_HOURS = 24.0
_NO_MODEL = ("--model.path", ".")
"""The settings of a fleet name a model, and nothing here loads it."""


def run(args: argparse.Namespace, flags: list[str]) -> int:
    """Print the answer; write what was asked for."""
    _check(args, flags)
    if args.example_trace:
        return _example(args.peak or PEAK, args.seed or 0)
    if args.calibrate:
        return _calibrate(args.calibrate, args.load or LOAD, args.out)
    if args.validate:
        return _validate(args.validate, args.load or LOAD, args.json)
    if args.trace is None:
        raise ConfigError("--trace FILE is missing; --example-trace prints one to begin with")
    scene, seconds = _scene(args, flags), _seconds(args.trace, args.hours)
    way: Way = way_for(scene.replicas, seconds, lends=scene.lends) if args.way is None else args.way
    with _progress() as told:
        outcome, choices = _answer(scene, args.trace, seconds, way, told, sweep=args.sweep)
    print(table(outcome, scene))
    if choices:
        print(f"\n{sweep_table(choices)}")
    if args.json:
        args.json.write_text(json.dumps(as_json(outcome, scene, choices), indent=1) + "\n")
    if args.plot:
        draw(args.plot, outcome, scene)
    return 0


def _answer(
    scene: Scene, file: Path, seconds: float, way: Way, told: Told, *, sweep: bool
) -> tuple[Outcome, list[Choice]]:
    options = scene.options
    longest, most_output = options.engine.max_model_len, options.gateway.limits.max_tokens

    def lines() -> Iterator[trace.Line]:
        return trace.read(file, longest=longest, most_output=most_output)

    def one(found: Scene, name: str) -> Outcome:
        def progress(what: str, share: float) -> None:
            told(f"{name}: {what}", share)

        return simulate(found, lines, seconds=seconds, way=way, progress=progress, load=users)

    if scene.lends and sweep:
        raise ConfigError("--sweep tries settings of the guard, which fleet.sharing.mode=lend has none of")
    scene.check()
    users = read_load(lines, seconds=seconds, progress=told)
    if scene.lends:  # beside the same fleet with none lent
        return one(scene, "lending"), []
    alone = one(users_alone(scene), "users alone")
    outcome = beside_users_alone(one(scene, "with rollouts"), alone)
    choices, tried = [], list(variants(scene)) if sweep else []
    for number, variant in enumerate(tried, start=1):
        name = f"settings {number} of {len(tried)}"
        found = outcome if variant == scene else beside_users_alone(one(variant, name), alone)
        choices.append(choice(variant, found))
    return outcome, choices


def _check(args: argparse.Namespace, flags: list[str]) -> None:
    """Before minutes of work: raises ConfigError for arguments and settings that nothing reads, and for files that
    cannot be written."""
    if why := unread(args):
        raise ConfigError(why)
    if flags and args.trace is None:
        raise ConfigError(f"{flags[0]}: settings are for --trace FILE; see nightshift simulate --help")
    outputs = {f"--{name}": getattr(args, name) for name in ("json", "plot", "out")}
    for flag, file in outputs.items():
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise ConfigError(f"{flag} {file}: cannot be written")


def _seconds(file: Path, hours: float | None) -> float:
    """That are simulated. Raises ConfigError where the trace begins later, or they are less than a tick."""
    most = 3600 * (_DAY_HOURS if hours is None else hours)
    if most < TICK_S:
        raise ConfigError(f"--hours {hours:g}: {most:g} s are less than the {TICK_S:g} s that loads are averaged over")
    told = trace.told_s(trace.read(file), most=most, whole_s=TICK_S)
    return told if hours is None else most


def _scene(args: argparse.Namespace, flags: list[str]) -> Scene:
    """Raises ConfigError."""
    config = load([args.settings] if args.settings else [], [*_NO_MODEL, *flags])
    model = read_engine(args.engine) if args.engine else EngineModel()
    if args.train_step_s is not None and config.train is not None:
        sampling = config.train.sampling
        model = model.model_copy(update={"work": model.work.sampled(sampling.n, sampling.max_tokens)})
    return Scene(
        model=model,
        options=config.fleet,
        replicas=config.fleet.autoscaling.max_replicas if args.replicas is None else args.replicas,
        training=_training(config, args.train_step_s),
        push_every_s=PUSH_EVERY_S if args.push_every_s is None else args.push_every_s,
        promise=config.fleet.slo,
        seed=args.seed or 0,
    )


def _training(config: NightshiftConfig, step_s: float | None) -> Training | None:
    if step_s is None:
        return None
    if config.train is None:
        raise ConfigError(f"--train-step-s {step_s:g} needs the [train] table that says how many groups a step takes")
    return Training(step_s, config.train.batch_groups, config.train.staleness)


def _example(peak: float, seed: int) -> int:
    for point in day_curve(peak, seed=seed):
        row = {"time": point.time, "rate": point.rate, "prompt_tokens": point.prompt, "output_tokens": point.tokens}
        print(json.dumps(row))
    return 0


def _calibrate(bench: Path, at: str, out: Path | None) -> int:
    with _progress() as told:
        model = calibrate(read_bench(bench), at=at, progress=told)
    text = json.dumps(model.model_dump(mode="json"), indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
    return 0


def _validate(bench: Path, at: str, out: Path | None) -> int:
    """1 where a prediction misses its bar."""
    with _progress() as told:
        found = validate(read_bench(bench), at=at, progress=told)
    print(validation_table(found))
    if out is not None:
        out.write_text(json.dumps([one.as_json() for one in found], indent=1) + "\n")
    return 0 if all(one.holds for one in found) else 1


@contextmanager
def _progress() -> Iterator[Told]:
    """A bar on a terminal's standard error, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
