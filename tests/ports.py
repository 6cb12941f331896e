"""A port for a server that a test starts in a moment."""

import random
import socket

_FIRST = 10_000
_COUNT = 20_000
"""Below the range that the kernel takes ports of outgoing connections from (32768 and up on Linux, 49152 elsewhere): of
those Ray opens dozens between the moment a port is chosen and the moment it is listened on."""


def free_port() -> int:
    """Nobody listens there now, and no outgoing connection can take it."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _FIRST + _COUNT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
