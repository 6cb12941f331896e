"""What a measurement was taken on, for its file of figures."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any


def machine() -> dict[str, Any]:
    """CPUs, operating system and the load that was there already."""
    return {"cpus": os.cpu_count(), "platform": platform.platform(), "load_at_start": os.getloadavg()[0]}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python and of those of the packages that are installed."""
    installed = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {p: installed[p] for p in packages if p in installed}
