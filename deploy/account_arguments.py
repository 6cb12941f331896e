"""Arguments of the commands that give an account of a run: `audit`, `explain` and `dead`."""

import argparse
from typing import TYPE_CHECKING

from deploy.arguments import positive, with_debug, with_files

if TYPE_CHECKING:
    from deploy.run_place import RunPlace

_EPILOG = "Without a server's address: that of REDIS_URL, else what the run's own config.json names."
_PLACE = (
    ("run", "NAME", "the run (default: NIGHTSHIFT_RUN, else `default`)"),
    ("train.runs_dir", "DIR", "where runs are (default runs)"),
    ("redis.url", "URL", "address of its server"),
    ("redis.dir", "DIR", "data directory of an embedded one"),
    ("redis.namespace", "NAME", "first part of its keys (default nightshift)"),
)
"""(setting, metavar, help) of what says where a run is."""


def add_accounts(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    _add_audit(commands)
    _add_explain(commands)
    _add_dead(commands)


def _with_place(parser: argparse.ArgumentParser) -> None:
    with_files(parser)
    for name, metavar, text in _PLACE:
        parser.add_argument(f"--{name}", dest=f"place_{name}", metavar=metavar, help=text)
    parser.epilog = _EPILOG


def _with_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def _place(args: argparse.Namespace, run: str | None = None) -> "RunPlace":
    """`run` is that of an id, where none is given. Raises ConfigError."""
    from deploy.run_place import find_run

    given = {name: getattr(args, f"place_{name}") for name, _, _ in _PLACE}
    given["run"] = given["run"] or run
    return find_run(args.config, {name: value for name, value in given.items() if value is not None})


def _add_audit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "Recompute from Redis, the journal and the checkpoints alone whether a run's promises hold: a line each, and"
        " every group, step or version that contradicts one. Exits with 1 where one does, with 5 where the run"
        " went on too fast to tell. The trainer may run on."
    )
    parser = commands.add_parser("audit", help="whether a run's promises hold", description=text, allow_abbrev=False)
    parser.add_argument("--files-only", action="store_true", help="judge the run's directory alone, without Redis")
    _with_json(parser)
    _with_place(parser)
    parser.set_defaults(run=_audit)


def _add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "What became of a group, or of each group of a submission: who leased it, its versions, rewards and step."
    parser = commands.add_parser("explain", help="the story of one rollout", description=text, allow_abbrev=False)
    parser.add_argument(
        "id", metavar="ID", help="of a group or a submission, as the queue or `nightshift rollout` names it"
    )
    _with_json(parser)
    _with_place(parser)
    parser.set_defaults(run=_explain)


def _add_dead(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("dead", help="groups that are not tried again", description="Dead letters of a run.")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True)
    listing = verbs.add_parser("list", help="newest first", description="Newest first.", allow_abbrev=False)
    listing.add_argument("--count", type=positive, default=100, help="most of them (default 100)")
    listing.set_defaults(run=_dead_list)
    show = verbs.add_parser("show", help="its story", description="As `nightshift explain`.", allow_abbrev=False)
    show.add_argument("id", metavar="ID")
    show.set_defaults(run=_explain)
    text = "Groups wait to be generated again, with no failures and no deadline. Not those that the trainer had."
    retry = verbs.add_parser("retry", help="have them generated again", description=text, allow_abbrev=False)
    retry.set_defaults(run=_dead_retry)
    text = "Forget the letters. The ledger counts their groups as dead still."
    drop = verbs.add_parser("drop", help="forget them", description=text, allow_abbrev=False)
    drop.set_defaults(run=_dead_drop)
    for verb in (retry, drop):
        which = verb.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", metavar="ID", nargs="*", default=[])
        which.add_argument("--all", action="store_true", help="every one of the run")
    for verb in (listing, show):
        _with_json(verb)
    for verb in (listing, show, retry, drop):
        _with_place(verb)
        with_debug(verb)


def _audit(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.audit import audit_run

    return audit_run(_place(args), files_only=args.files_only, as_json=args.json)


def _explain(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.explain import explain
    from services.submissions import split_id

    run, identifier = split_id(args.id) or (None, args.id)
    return explain(_place(args, run), identifier, as_json=args.json)


def _dead_list(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.dead import list_letters

    return list_letters(_place(args), count=args.count, as_json=args.json)


def _dead_retry(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.dead import retry

    return retry(_place(args), args.ids, every=args.all)


def _dead_drop(args: argparse.Namespace, _flags: list[str]) -> int:
    from deploy.dead import drop

    return drop(_place(args), args.ids, every=args.all)
