"""What a running engine shares is unlinked while it runs, and works on."""

import os
import subprocess
import sys
from pathlib import Path

from services.shared_memory import unlink_below

_SHARER = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
sys.stdin.readline()
memory.buf[0] = 7
print(memory.buf[0], flush=True)
"""


def test_what_a_child_has_mapped_is_unlinked_and_stays_usable() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SHARER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        path = Path("/dev/shm") / child.stdout.readline().strip()
        assert path.exists()
        assert str(path) in unlink_below(os.getpid())
        assert not path.exists()
        assert str(path) not in unlink_below(os.getpid())
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == "7"


def test_nothing_is_found_below_a_process_without_children() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        assert unlink_below(child.pid) == []
