"""What the product's seat keeper sees of a modelled engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.step_log import StepLog
from services.step_room import StepRoom
from services.user_window import RequestTimes


@dataclass(slots=True)
class Eyes:
    """As `services.seat_keeper.Watched` says."""

    step_log: StepLog
    step_room: StepRoom
    rollouts_give_way: bool
    live: Mapping[str, RequestTimes] = field(default_factory=dict)

    def users(self) -> Mapping[str, RequestTimes]:
        return self.live


@dataclass(frozen=True, slots=True)
class Step:
    """As vLLM tells of one, token by token."""

    inter_token_latencies_iter: list[float]
    time_to_first_tokens_iter: list[float]
    finished_requests: Iterable[object] = ()
    """None here: those of users are told of by name."""

    @property
    def num_generation_tokens(self) -> int:
        return len(self.inter_token_latencies_iter) + len(self.time_to_first_tokens_iter)
