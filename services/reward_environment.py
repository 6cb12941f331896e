"""The environment of the processes that run reward functions: an allow-list, since what they score is others' text."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import rollout

_NAMES = frozenset({
    "HF_HOME", "HF_HUB_OFFLINE", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "MPLCONFIGDIR", "PATH", "SSL_CERT_DIR",
    "SSL_CERT_FILE", "TMPDIR", "TZ", "VIRTUAL_ENV", "XDG_CACHE_HOME",
})  # fmt: skip
_PREFIXES = ("LC_", "OMP_", "PYTHON", "NIGHTSHIFT_TREE_")
"""The last marks the processes of a local fleet, by which those that are left over are found and ended."""


def reward_environment(
    environ: Mapping[str, str], *, python_path: Sequence[Path] = (), also: Sequence[str] = ()
) -> dict[str, str]:
    """What of `environ` they get, and the names in `also`: with Nightshift and the operator's directories importable,
    one thread for numeric libraries, and no GPU."""
    kept = {n: v for n, v in environ.items() if n in _NAMES or n in also or n.startswith(_PREFIXES)}
    root = str(Path(rollout.__file__).parent.parent)
    paths = [root, *(str(path.resolve()) for path in python_path), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | fixed
