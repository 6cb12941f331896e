"""The command `nightshift`.

Exit codes: 0 done, 1 the work failed (engine, training, a goal), 2 the command, configuration or environment is wrong
and nothing was started, 3 Redis or the gateway does not answer, 4 a run has to be looked at before it can go on, 5 an
audit could not tell, 130 interrupted by the user. Errors are one paragraph with the remedy; `--debug` shows the
traceback as well. Heavy imports happen inside the commands, after parsing.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deploy.account_arguments import add_accounts
from deploy.arguments import path, port, positive, with_config, with_debug, with_flags
from deploy.simulate_arguments import add_simulate

OK, FAILED, USAGE, UNAVAILABLE, STUCK, INTERRUPTED = 0, 1, 2, 3, 4, 130

Command = Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Parse, run, exit."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """The exit code of one command line."""
    parser = _parser()
    args, flags = parser.parse_known_args(list(argv))
    if args.command is None:
        parser.print_help()
        return USAGE
    if flags and not args.takes_flags:
        return _say(f"{flags[0]}: unknown argument; see nightshift {args.command} --help", USAGE)
    if getattr(args, "all_flags", False):
        if flags:
            return _say(f"{flags[0]}: give --all-flags without other settings; it lists their defaults", USAGE)
        args.run = _list_flags
        return _guarded(args, flags)
    if (setting := _before_file(args, argv, flags)) is not None:
        return _say(f"{setting}: give FILE before settings, or {setting}=VALUE", USAGE)
    _set_logging(debug=args.debug, talkative=args.command == "train")
    signal.signal(signal.SIGTERM, _interrupt)
    return _guarded(args, flags)


def _before_file(args: argparse.Namespace, argv: Sequence[str], flags: Sequence[str]) -> str | None:
    """The setting whose value was taken for the command's FILE: the parser does not know which settings have one."""
    file = getattr(args, "file", None)
    before = next((before for before, word in pairwise(argv) if file is not None and path(word) == file), "")
    return before if before.startswith("--") and "=" not in before and before in flags else None


def _list_flags(_args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.config import flags_help

    print(flags_help(), flush=True)
    return OK


def _guarded(args: argparse.Namespace, flags: list[str]) -> int:
    from rollout.errors import NightshiftError

    try:
        command: Command = args.run
        return command(args, flags)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except NightshiftError as error:
        if args.debug:
            raise
        return _say(str(error), _code(error))
    except Exception as error:
        if args.debug:
            raise
        return _say(
            f"{type(error).__name__}: {error}. This was not expected; --debug shows where it comes from.", FAILED
        )


def _code(error: Exception) -> int:
    from rollout.errors import ConfigError, StoreUnavailable
    from trainer.errors import CheckpointError, ForeignServer, NothingToTrain, OlderServer, TrainingDiverged

    match error:
        case ConfigError():
            return USAGE
        case StoreUnavailable():
            return UNAVAILABLE
        case CheckpointError() | ForeignServer() | NothingToTrain() | OlderServer() | TrainingDiverged():
            return STUCK
        case _:
            return FAILED


def _say(message: str, code: int) -> int:
    print(f"nightshift: {message}", file=sys.stderr)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a command the way Ctrl-C does."""
    raise KeyboardInterrupt


def _set_logging(*, debug: bool, talkative: bool) -> None:
    """Our own log lines go to standard error; the frameworks' are in their log files, or here with --debug."""
    import logging

    import structlog

    level = logging.DEBUG if debug else logging.INFO if talkative else logging.WARNING
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if not debug:
        import warnings

        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nightshift",
        description="RL rollouts on the idle seats of a live vLLM serving fleet.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong command or configuration, "
        "3 Redis or gateway not there, 4 a run has to be looked at, 5 an audit could not tell, 130 interrupted.",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and all log lines")
    parser.set_defaults(command=None, takes_flags=False)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    _add_serve(commands)
    _add_train(commands)
    _add_record(commands)
    _add_demo(commands)
    _add_rollout(commands)
    add_simulate(commands)
    _add_status(commands)
    add_accounts(commands)
    _add_doctor(commands)
    version = commands.add_parser("version", help="print the version", description="Print the version.")
    version.set_defaults(run=_version)
    for command in commands.choices.values():
        with_debug(command)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Start a fleet on this machine: Redis, Ray, gateway and engines. Ctrl-C stops it."
    parser = commands.add_parser("serve", help="start a fleet on this machine", description=text, allow_abbrev=False)
    with_config(parser)
    parser.set_defaults(run=_serve)


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Train on the rollouts of a fleet. Continues from the newest checkpoint of the run. Ctrl-C saves and stops."
    parser = commands.add_parser("train", help="train a run", description=text, allow_abbrev=False)
    with_config(parser)
    parser.add_argument(
        "--replay",
        type=path,
        metavar="FILE",
        help="train from a recording, without engines, gateway and Redis; the run is called <run>-replay",
    )
    parser.set_defaults(run=_train)


def _add_record(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "Write the experience of a run to FILE, for `nightshift train --replay FILE`: every scored group that the"
        " server still keeps, in the order in which they were scored. A FILE of the same run is continued. Nothing is"
        " leased or settled: the trainer may run on."
    )
    parser = commands.add_parser(
        "record", help="write a run's experience to a file", description=text, allow_abbrev=False
    )
    parser.add_argument("file", type=path, metavar="FILE", help="recording to write or to continue")
    parser.add_argument("--follow", action="store_true", help="go on as groups come, until Ctrl-C")
    with_config(parser)
    parser.set_defaults(run=_record)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Train a small policy while it serves users, and report."
    parser = commands.add_parser("demo", help="the whole loop on this machine", description=text, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--steps", type=positive, help="training steps")
    parser.add_argument(
        "--recipe",
        type=path,
        metavar="FILE",
        help="TOML laid over the demo's settings, such as deploy/recipes/grpo.toml",
    )
    parser.add_argument(
        "--dir", type=path, help="where the run lives (default runs/demo, with a recipe runs/demo-<its name>)"
    )
    with_flags(parser)
    parser.set_defaults(run=_demo)


def _with_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="gateway (default: the local fleet's, else http://127.0.0.1:8000)")
    parser.add_argument("--state-dir", type=path, default=Path("runs/.nightshift"), help="where serve keeps its tokens")
    parser.add_argument("--fleet-name", default="fleet", help="which local fleet")


def _add_rollout(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("rollout", help="submit, follow and cancel rollouts", description="Rollouts by HTTP.")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True)
    submit = verbs.add_parser(
        "submit", help="submit prompts; prints the id", description="Submit prompts; prints the id."
    )
    submit.add_argument(
        "file", type=path, nargs="?", help="JSONL: prompt, messages or prompt_ids; other keys are metadata"
    )
    submit.add_argument("-p", "--prompt", action="append", default=[], help="a prompt; may be repeated")
    submit.add_argument("-n", "--n", type=int, default=1, help="samples a prompt (default 1)")
    submit.add_argument("--max-tokens", type=int, help="response tokens (default: 256, or what there is room for)")
    submit.add_argument("--temperature", type=float, default=1.0)
    submit.add_argument("--reward", help="name of a reward function that the fleet allows")
    submit.add_argument("--reward-params", metavar="JSON", help="its parameters: '{\"ignore_case\": true}'")
    submit.add_argument("--purpose", choices=["collect", "eval", "train"], default="collect")
    submit.add_argument("--run", dest="run_name", help="run it belongs to (default: NIGHTSHIFT_RUN, else the fleet's)")
    submit.add_argument("--key", help="idempotency key: the same key and body is the same submission")
    submit.add_argument("--tail", action="store_true", help="then follow it, as `tail` does")
    submit.set_defaults(run=_rollout_submit)
    tail = verbs.add_parser(
        "tail", help="print samples as JSON lines as they finish", description="Follow a submission."
    )
    tail.add_argument("id")
    tail.set_defaults(run=_rollout_tail)
    cancel = verbs.add_parser("cancel", help="end what has not been generated", description="Cancel a submission.")
    cancel.add_argument("id")
    cancel.set_defaults(run=_rollout_cancel)
    for verb in (submit, tail, cancel):
        _with_gateway(verb)
        with_debug(verb)


def _add_status(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="the fleet, its queues and its ledger", description="Ask the gateway.")
    _with_gateway(parser)
    parser.add_argument("--json", action="store_true", help="the answer as it is")
    parser.set_defaults(run=_status)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor", help="check this machine", description="Check this machine and say what to do."
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--port", type=port, default=8000, help="port the gateway would use (default 8000)")
    parser.add_argument("--model", type=path, help="also check this model directory")
    parser.add_argument("--state-dir", type=path, default=Path("runs/.nightshift"), help="where serve keeps its state")
    parser.set_defaults(run=_doctor)


def _serve(args: argparse.Namespace, flags: list[str]) -> int:
    from deploy.config import load

    config = load(args.config, flags)
    from deploy.serving import serve

    return serve(config)


def _train(args: argparse.Namespace, flags: list[str]) -> int:
    from deploy.config import load

    config = load(args.config, flags)
    from deploy.training import train

    return train(config, replay=args.replay)


def _record(args: argparse.Namespace, flags: list[str]) -> int:
    from deploy.config import load

    config = load(args.config, flags)
    from deploy.record import write_recording

    return write_recording(config, args.file, until_stopped=args.follow)


def _demo(args: argparse.Namespace, flags: list[str]) -> int:
    from deploy.demo import run

    return int(run.main(args, flags))


def _rollout_submit(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.rollouts import submit

    return submit(args)


def _rollout_tail(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.rollouts import tail

    return tail(args)


def _rollout_cancel(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.rollouts import cancel

    return cancel(args)


def _status(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.status import show

    return show(args)


def _doctor(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.doctor import examine

    return examine(port=args.port, model=args.model, state_dir=args.state_dir, as_json=args.json)


def _version(_args: argparse.Namespace, _flags: list[str]) -> int:
    from importlib.metadata import version

    print(version("nightshift-rl"))
    return OK


if __name__ == "__main__":
    main()
