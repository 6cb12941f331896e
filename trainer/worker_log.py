"""What a worker process printed: where Ray keeps it, and its end once the process is gone."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_STDERR = "/proc/self/fd/2"
_LINES = 20
_BYTES = 8192


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The file that a worker's standard error goes to."""

    node: str
    """Address of the machine."""
    path: str
    """Empty where it is no file."""

    def end(self) -> str:
        """For an error message: the last lines where the file can be read from here, or else where it is."""
        if not self.path:
            return ""
        try:
            lines = tail(Path(self.path))
        except OSError:  # on another machine, or another user's
            return f"; its log is {self.path} on {self.node}"
        return f"; the end of its log {self.path}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def own_log_path() -> str:
    """Of this process; empty where its standard error is no file."""
    try:
        return str(Path(_STDERR).readlink()) if stat.S_ISREG(os.fstat(2).st_mode) else ""
    except OSError:
        return ""


def tail(file: Path) -> list[str]:
    """The last lines, of the last 8 kB; a line that begins before them is left out."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _BYTES))
        text = stream.read().decode(errors="replace")
    lines = text.splitlines()
    return lines[1 if size > _BYTES else 0 :][-_LINES:]
