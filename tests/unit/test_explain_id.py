"""`explain` takes the ids that the queue gives, and those that `nightshift rollout submit` prints."""

import argparse

import pytest

from deploy import explain, run_place
from deploy.account_arguments import add_accounts


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["explain", "mine~51-0"], ({"run": "mine"}, "51-0")),
        (["explain", "51-0"], ({}, "51-0")),
        (["explain", "51", "--run", "mine"], ({"run": "mine"}, "51")),
        (["explain", "mine~51", "--run", "other"], ({"run": "other"}, "51")),
        (["dead", "show", "mine~51-0"], ({"run": "mine"}, "51-0")),
    ],
)
def test_an_id_names_its_run(line: list[str], expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_place, "find_run", lambda _files, given: given)
    monkeypatch.setattr(explain, "explain", lambda place, identifier, as_json: (place, identifier))
    parser = argparse.ArgumentParser()
    add_accounts(parser.add_subparsers())
    args = parser.parse_args(line)
    assert args.run(args, []) == expected
