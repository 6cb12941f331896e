"""A service that scores samples over HTTP, and the reward functions that an operator might write, good and bad."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import urlopen

from rollout.rewards import RewardInput

GOOD = b'{"reward": 0.5}'


@dataclass(frozen=True)
class Reply:
    """To one question."""

    body: bytes = GOOD
    status: int = 200
    after_s: float = 0.0


class Judge:
    """What it replies is by how often it was asked about the same prompt, from 1."""

    def __init__(self, reply: Callable[[int], Reply]) -> None:
        self.asked = Counter[str]()
        self.closing = Event()
        self._reply = reply

    def reply_to(self, question: dict[str, Any]) -> Reply:
        self.asked[question["prompt"]] += 1
        return self._reply(self.asked[question["prompt"]])


@contextmanager
def serving(judge: Judge) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reply = judge.reply_to(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            judge.closing.wait(reply.after_s)
            self.send_response(reply.status)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who asked is killed at its time limit
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        judge.closing.set()
        server.shutdown()
        server.server_close()


def judged(sample: RewardInput) -> Any:
    """Whatever the service says."""
    question = json.dumps({"prompt": sample.prompt, "completion": sample.completion}).encode()
    with urlopen(sample.params["url"], data=question) as answer:
        return json.load(answer)


def exits(sample: RewardInput) -> float:
    """Ends its process."""
    _note(sample)
    os._exit(3)


def killed(sample: RewardInput) -> float:
    """Its process is ended, as the kernel does where memory is short."""
    _note(sample)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def hangs(sample: RewardInput) -> float:
    """Past any limit."""
    _note(sample)
    time.sleep(600)
    return 0.0


def _note(sample: RewardInput) -> None:
    """Which process it is, in a file of the test's."""
    with Path(sample.params["note"]).open("a") as note:
        note.write(f"{os.getpid()}\n")
