"""`make bench-simulate`: how long a day of 1,000 replicas takes; into runs/bench/simulate.json and simulate.png."""

import argparse
import json
import sys
import time
from pathlib import Path

from environment import machine

from deploy.simulation.engine_model import EngineModel
from deploy.simulation.outcome import beside_users_alone, simulate, users_alone
from deploy.simulation.plot import draw
from deploy.simulation.report import as_json, table
from deploy.simulation.scene import Scene
from deploy.simulation.users import day_curve
from services.config import FleetOptions
from services.slo import SloConfig

_PEAK = 1.5
"""Users a second and replica."""
_DAY_S = 86_400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    slo = SloConfig(ttft_s=0.4, tpot_s=0.06)
    limits = {"max_user_requests": 32 * arguments.replicas}
    settings = {"engine": {"max_num_seqs": 32}, "slo": slo.model_dump(), "gateway": {"limits": limits}}
    options = FleetOptions.model_validate(settings)
    scene = Scene(EngineModel(), options, arguments.replicas, None, 60.0, slo, 1)
    points = list(day_curve(_PEAK * arguments.replicas, seed=1))
    began = time.perf_counter()
    outcome, alone = (
        simulate(one, lambda: points, seconds=_DAY_S, way="replicas", progress=lambda *_: None)
        for one in (scene, users_alone(scene))
    )
    took_s = time.perf_counter() - began
    outcome = beside_users_alone(outcome, alone)
    arguments.out.mkdir(parents=True, exist_ok=True)
    head = {"command": sys.argv, "machine": machine(), "took_s": took_s}
    (arguments.out / "simulate.json").write_text(json.dumps({**head, **as_json(outcome, scene)}, indent=1) + "\n")
    draw(arguments.out / "simulate.png", outcome, scene)
    print(f"{table(outcome, scene)}\n{arguments.replicas} replicas x 24 h with and without rollouts: {took_s:.1f} s")


if __name__ == "__main__":
    main()
