"""A deployment without an engine, that Serve scales by what a file says of users: see test_autoscaling."""

import asyncio
import json
import os
from pathlib import Path

from ray import serve

from services.stopping import stopping

DIRECTORY = "NIGHTSHIFT_TEST_DIRECTORY"


@serve.deployment(name="Light", ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=20)
class Light:
    def __init__(self) -> None:
        self._directory = Path(os.environ[DIRECTORY])
        self._task = asyncio.create_task(self._note_stop())

    async def _note_stop(self) -> None:
        while not stopping():  # noqa: ASYNC110  Serve gives no notice
            await asyncio.sleep(0.05)
        (self._directory / f"stopping-{os.getpid()}").touch()

    def record_autoscaling_stats(self) -> dict[str, float]:
        figures: dict[str, float] = json.loads((self._directory / "stats.json").read_text())
        return figures

    async def __call__(self, gate: str) -> int:
        """The process that answers, once the file `gate` is there."""
        while not (self._directory / gate).exists():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.05)
        return os.getpid()


app = Light.bind()  # type: ignore[attr-defined]
