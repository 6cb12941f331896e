"""The part of a bench fleet's settings that is the same in every bench."""

import json
from pathlib import Path


def fleet_toml(directory: Path, *, model: Path, port: int) -> str:
    """Of a fleet that keeps all it writes in `directory`; ends with an empty line, so that sections may follow."""
    return f"""\
run = "bench"
fleet_name = "bench"
state_dir = {json.dumps(str(directory / "state"))}
[model]
path = {json.dumps(str(model.absolute()))}
[redis]
dir = {json.dumps(str(directory / "redis"))}
[fleet.gateway]
port = {port}
"""
