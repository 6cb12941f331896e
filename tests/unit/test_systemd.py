"""The service files run commands that exist, stop them as they stop, and do not restart what cannot start."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from deploy import cli, doctor

UNITS = sorted((Path(cli.__file__).parent / "systemd").glob("*.service"))


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    parser.read_string(path.read_text())
    return parser


def test_there_is_one_for_the_fleet_and_one_for_the_trainer() -> None:
    assert [path.name for path in UNITS] == ["nightshift-serve.service", "nightshift-train.service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_command_is_one_of_ours(path: Path) -> None:
    program, *arguments = shlex.split(unit(path)["Service"]["ExecStart"])
    assert program.endswith("/bin/nightshift")
    parsed, flags = cli._parser().parse_known_args(arguments)
    assert path.stem == f"nightshift-{parsed.command}"
    assert [str(file) for file in parsed.config] == ["/etc/nightshift/nightshift.toml"]
    assert flags == []


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_wrong_configuration_is_not_started_again_and_a_crash_is(path: Path) -> None:
    service = unit(path)["Service"]
    final = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert final == ({cli.USAGE, cli.STUCK} if path.stem == "nightshift-train" else {cli.USAGE})
    assert service["Restart"] == "on-failure"
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_what_they_write_is_for_nobody_else(path: Path) -> None:
    assert unit(path)["Service"]["UMask"] == "0077"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_file_of_their_secrets_is_the_one_that_doctor_looks_at_and_is_said_to_be_private(path: Path) -> None:
    assert unit(path)["Service"]["EnvironmentFile"] == f"-{doctor._SERVICE_ENVIRONMENT}"
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"okens and REDIS_URL.* has mode 0600, owned by root:root", comments)
