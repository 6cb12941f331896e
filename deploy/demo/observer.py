"""What the demo sees of the loop while it runs: replicas and pushes on the board, the trainer's metrics file."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.board import AppliedPush, Board
from trainer.json_lines import LinesSinceLastLook


@dataclass(frozen=True, slots=True)
class Rate:
    """Rollout tokens a second over one look."""

    at: float
    """Unix seconds."""
    tok_s: float


class Observer:
    """Call `look` every second or so; everything seen is kept."""

    def __init__(self, board: Board, fleet: str, metrics_file: Path) -> None:
        self.started_at = time.time()
        """Unix seconds; what is older belongs to an earlier session of the run."""
        self.pushes: dict[tuple[int, str], AppliedPush] = {}
        """By (version, replica)."""
        self.rehearsal_gaps: dict[str, float] = {}
        self.repeated: set[int] = set()
        """Steps that an earlier session had done before it was killed, with the same groups."""
        self.generated: dict[str, int] = {}
        """Rollout tokens by replica."""
        self.rates: list[Rate] = []
        self.replicas_now = 0
        self._board, self._fleet = board, fleet
        self._metrics = LinesSinceLastLook(metrics_file)
        self._steps: dict[int, dict[str, Any]] = {}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The trainer's metrics, one mapping a step; of a step repeated after a resume, the last."""
        return [self._steps[step] for step in sorted(self._steps)]

    @property
    def replicas(self) -> list[str]:
        """Every replica ever seen."""
        return sorted(self.generated)

    @property
    def tok_s(self) -> float:
        """Harvested tok/s over the newest looks."""
        newest = self.rates[-5:]
        return sum(r.tok_s for r in newest) / len(newest) if newest else 0.0

    async def look(self) -> None:
        """Raises StoreUnavailable."""
        beats = await self._board.replicas(self._fleet)
        now, before = time.time(), sum(self.generated.values())
        self.replicas_now = len(beats)
        for beat in beats:
            self.generated[beat.replica] = max(beat.rollout_tokens, self.generated.get(beat.replica, 0))
            self.pushes.update({(push.version, beat.replica): push for push in beat.pushes})
            if beat.rehearsal_gap is not None:
                self.rehearsal_gaps[beat.replica] = beat.rehearsal_gap
        grown = sum(self.generated.values()) - before
        since = self._looked_at if self.rates else now - 1.0
        self.rates.append(Rate(now, grown / max(now - since, 1e-3)))
        for line in self._metrics.new():
            self._add_step(line)

    def _add_step(self, line: dict[str, Any]) -> None:
        earlier = self._steps.get(line["step"])
        if earlier is not None and earlier["time"] < self.started_at:
            self.repeated.add(line["step"])
        self._steps[line["step"]] = line

    @property
    def _looked_at(self) -> float:
        return self.rates[-1].at

    def pushes_by_version(self) -> dict[int, Mapping[str, AppliedPush]]:
        """Version -> replica -> what the replica reported; ascending."""
        grouped: dict[int, dict[str, AppliedPush]] = defaultdict(dict)
        for (version, replica), push in sorted(self.pushes.items(), key=lambda item: item[0]):
            grouped[version][replica] = push
        return dict(grouped)
