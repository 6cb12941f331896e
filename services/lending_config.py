"""When whole replicas are lent: settings."""

from pydantic import Field, model_validator

from rollout.config import ModelConfig, Settings
from services.autoscaling.windows import overlapping
from services.lending_calendar import LendWindow
from services.time_zone import TimeZone


class LendingConfig(Settings):
    """When whole replicas go to rollouts, with `sharing.mode = "lend"`."""

    production: ModelConfig | None = None
    """What users are served: path and name. Of the policy's architecture, tokenizer and chat template."""
    time_zone: TimeZone = "UTC"
    """Of the calendar, such as Europe/Berlin."""
    calendar: tuple[LendWindow, ...] = ()
    """Windows {days, start, end, replicas}; nothing is lent outside of them. Without any, lending knows no hours."""
    min_serving: int = Field(default=1, ge=1, le=1024)
    """Replicas that are never lent."""
    headroom: float = Field(default=1.25, ge=1, le=100)
    """A replica is lent only if the others could serve the forecast times this, at `requests_per_replica` each; it is
    called back where they cannot serve the forecast itself."""
    requests_per_replica: float = Field(default=8.0, gt=0)
    """User requests in flight that a replica is to serve at once, where one for n sequences counts as n; with more than
    `engine.max_num_seqs` some of them wait for a seat while other replicas are lent."""
    lend_after_s: float = Field(default=60.0, ge=0, le=86_400)
    """A replica is lent when users have not needed it for so long."""
    quiet_s: float = Field(default=300.0, ge=0, le=86_400)
    """Least time between a change of how many are lent and lending more."""
    min_gain: float = Field(default=3.0, ge=0)
    """Tokens that lending must promise to harvest for each token that the two swaps cost."""
    tokens_per_s: float = Field(default=100.0, gt=0)
    """Expected harvest of a lent replica, until it is measured."""
    switch_s: float = Field(default=30.0, gt=0)
    """Expected time of both swaps together, until it is measured."""
    drain_s: float = Field(default=120.0, gt=0)
    """A user who is not through after so long keeps the replica."""
    enter_s: float = Field(default=120.0, gt=0)
    """A lent replica without verified and recent weights for so long goes back to users."""
    reclaim_s: float = Field(default=120.0, gt=0)
    """A replica whose production model is not back after so long is replaced; a push that was under way has as long to
    end before."""
    rest_s: float = Field(default=60.0, ge=0)
    """A replica that could not be lent is left alone for so long, and twice as long each further time in a row, up to
    32 times that."""
    wish_s: float = Field(default=10.0, ge=3, le=600)
    """A lent replica that hears nothing of the gateway's decision for so long goes back to users. The gateway decides
    twice a second, and one answer of Redis may be two seconds late."""
    poll_s: float = Field(default=0.05, gt=0, le=10)
    """Wait between two looks at the gateway's decision."""

    @model_validator(mode="after")
    def _one_number_at_a_time(self) -> "LendingConfig":
        if found := overlapping([lent.window for lent in self.calendar]):
            raise ValueError(f"calendar: {found[0]} and {found[1]} overlap; give windows that follow each other")
        return self
