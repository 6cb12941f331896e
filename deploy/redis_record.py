"""`server.json`: which process serves a data directory, and at which address, also once it is gone.

The record names the directory it was written for. A copy of the directory carries the record along, and must neither
join the original's server nor take over its address.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started."""

    pid: int
    """As its starter saw it: in another container it is another process, or none."""
    socket: str


class ServerRecord:
    """The file of one data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / "server.json"

    def read(self) -> Server | None:
        """None where there is no record, or one of another directory."""
        try:
            content = json.loads(self._file.read_text())
            if content.pop("directory") != self._identity():
                return None
            return Server(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, server: Server) -> None:
        """Whole or not at all: a reader never sees half of it. Raises OSError."""
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({**asdict(server), "directory": self._identity()}))
        draft.replace(self._file)

    def _identity(self) -> dict[str, Any]:
        status = self._directory.stat()
        return {"path": str(self._directory.resolve()), "device": status.st_dev, "inode": status.st_ino}
