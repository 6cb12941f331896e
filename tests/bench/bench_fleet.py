"""A fleet that a bench starts on this machine, and lets its users in by."""

from pathlib import Path
from typing import Any, Self

from deploy.config import load
from deploy.local import LocalFleet
from tests.bench.coserve.users import Door
from tests.bench.fleet_toml import fleet_toml

# float32: processors without bfloat16 instructions compute it the slower way. Small blocks: what a cut sample has is
# found in the prefix cache but for the last of them.
_ENGINE = """\
[fleet.engine]
dtype = "float32"
max_model_len = 512
max_num_seqs = {seats}
long_prefill_token_threshold = {prefill_chunk}
first_token_steps = {first_token_steps}
[fleet.engine.extra]
block_size = 32
[fleet.push]
rollouts = "{push_rollouts}"
"""


class BenchFleet:
    """Engines of so many `seats`, with `more` settings as TOML; keeps all it writes in `directory`.

    A context manager; raises what LocalFleet raises.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: Path,
        port: int,
        seats: int,
        prefill_chunk: int = 32,
        first_token_steps: int = 4,
        push_rollouts: str = "keep",
        more: str = "",
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "bench.toml"
        path.write_text(
            fleet_toml(directory, model=model, port=port)
            + _ENGINE.format(
                seats=seats,
                prefill_chunk=prefill_chunk,
                first_token_steps=first_token_steps,
                push_rollouts=push_rollouts,
            )
            + more
        )
        self._local = LocalFleet(load([path]), progress=lambda phase: print(f"starting {phase}", flush=True))

    def __enter__(self) -> Self:
        self._local.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    @property
    def config(self) -> Any:
        """The FleetConfig, with the address of Redis."""
        return self._local.config

    @property
    def door(self) -> Door:
        """Of users, to the model that is theirs."""
        production = self.config.lending.production
        return Door(self._local.url, self._local.tokens.user, (production or self.config.model).name)
