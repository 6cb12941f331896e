"""Everything that one simulated fleet is made of, besides its users."""

from dataclasses import dataclass

from deploy.simulation.engine_model import EngineModel
from deploy.simulation.work import Training
from rollout.errors import ConfigError
from services.config import FleetOptions
from services.seat_guard import check_attainable
from services.slo import SloConfig


@dataclass(frozen=True, slots=True)
class Scene:
    """Settings, hardware and the other half of the loop."""

    model: EngineModel
    options: FleetOptions
    replicas: int
    """The most there are."""
    training: Training | None
    """None: rollouts end at their client, as many as there are seats for."""
    push_every_s: float | None
    """Without a trainer: new weights so often. With one each step brings them."""
    promise: SloConfig
    """By which users are judged; the guard steers by `options.slo`."""
    seed: int

    @property
    def lends(self) -> bool:
        return self.options.sharing.mode == "lend"

    def check(self) -> None:
        """Raises ConfigError where engines are shared in a way that is not modelled, no user could be kept inside the
        SLO, or nothing says what inside is."""
        if (adapter := self.options.sharing.user_adapter) is not None:
            raise ConfigError(
                f"fleet.sharing.user_adapter={adapter} is not modelled: adapter_slowness of the engine file says what"
                " rollouts on an adapter cost users who are on none"
            )
        if self.lends and (serving := self.options.lending.min_serving) >= self.replicas:
            raise ConfigError(f"fleet.lending.min_serving={serving} leaves none of --replicas {self.replicas} to lend")
        if not self.promise.guards:
            raise ConfigError(
                "fleet.slo.ttft_s and fleet.slo.tpot_s are both missing: at least one says what users are promised"
            )
        seats, given = self.options.engine.max_num_seqs, self.options.engine.max_num_batched_tokens
        if (tokens := self.model.step_tokens(given)) < seats:
            name = "batched_tokens of the engine file" if given is None else "fleet.engine.max_num_batched_tokens"
            raise ConfigError(
                f"{name}={tokens} is below fleet.engine.max_num_seqs={seats}: a step has a token for each"
            )
        check_attainable(self.promise, self.model.idle_speed(self.options.engine.max_num_seqs))
