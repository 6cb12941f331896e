"""A simulated replica with a clock that is set by hand."""

from typing import Any

from deploy.simulation.engine_model import EngineModel
from deploy.simulation.felt import Felt
from deploy.simulation.live import Story, constant, play
from deploy.simulation.replica import Replica
from deploy.simulation.scene import Scene
from deploy.simulation.work import Training, Work
from services.config import FleetOptions
from services.slo import SloConfig
from trainer.config import StalenessConfig

SEATS = 8
MODEL = EngineModel(decode_s=((1, 0.02), (8, 0.04)), prefill_token_s=0.0002, drift=0.05)
PROMISE = SloConfig(ttft_s=0.5, tpot_s=0.1)
TRAINING = Training(step_s=4.0, batch_groups=2, staleness=StalenessConfig(eta=1))


def scene(*, guard: bool = True, seed: int = 0, replicas: int = 1, **harvest: Any) -> Scene:
    options = FleetOptions.model_validate(
        {"engine": {"max_num_seqs": SEATS}, "harvest": {"user_reserve": 0, **harvest}}
    )
    if guard:
        options = options.model_copy(update={"slo": PROMISE})
    return Scene(MODEL, options, replicas, None, 10.0, PROMISE, seed)


def told(one: Scene, rate: float, seconds: float = 40.0) -> Story:
    users = constant(rate, seconds=seconds + 10, prompt=32, tokens=24, seed=5)
    return play(one, users, seconds=seconds, span_s=5.0, warm_s=10.0)


class Bench:
    """One replica with a clock that is set by hand."""

    def __init__(self, one: Scene) -> None:
        self.now = 0.0
        self.felt: list[Felt] = []
        self.work = Work(one.model.work, one.training, seed=1)
        self.replica = Replica(
            one.model, one.options, self.work, clock=lambda: self.now, answered=self.felt.append, seed=2
        )

    def step(self) -> None:
        """To the next moment at which the replica wants to be called."""
        assert self.replica.next_at is not None
        self.now = self.replica.next_at
        self.replica.proceed()
