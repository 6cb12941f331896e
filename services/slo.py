"""What users are promised."""

from pydantic import Field

from rollout.config import Settings


class SloConfig(Settings):
    """95th percentiles that users are to feel, and how rollouts are steered to it. Without a target rollouts take every
    seat that users leave."""

    ttft_s: float | None = Field(default=None, gt=0)
    """Seconds to the first token, from where Serve's proxy has the request, as far as the gateway can tell."""
    tpot_s: float | None = Field(default=None, gt=0)
    """Seconds between two tokens, mean of a request."""
    window_s: float = Field(default=10.0, gt=0, le=300)
    """How far back the percentiles look, and the longest that seats are kept free for users at their most. Rollouts
    leave that had no room in a step for so long, and a breach counts that lasts as long, whoever is to blame."""
    most_headroom: float = Field(default=0.9, gt=0, le=1)
    """Largest share of what users alone leave of a target, beyond which rollouts get less of the engine. The one in
    force is learned from users, from 0.8 of this on, between 0.2 of it and all of it."""
    miss_share: float = Field(default=0.003, gt=0, le=0.5)
    """Share of users that rollouts may have miss a target: where more of those who had rollouts beside them miss one
    that they would not have missed alone, the headroom sinks, else it rises."""
    increase_per_s: float = Field(default=0.05, gt=0, le=10)
    """More of the limit a second while inside, as a share of the engine's seats."""
    ease: float = Field(default=0.9, gt=0, lt=1)
    """Share of the limit that stays where users are near a target, at each look that finds so under it."""
    decrease: float = Field(default=0.7, gt=0, lt=1)
    """Share of the limit that rollouts come back to after a target was missed."""
    hold_s: float = Field(default=0.5, gt=0, le=60)
    """Time after the last look that found a target missed, until rollouts are back."""

    @property
    def targets(self) -> tuple[float | None, float | None]:
        """Of first tokens, and between tokens."""
        return self.ttft_s, self.tpot_s

    @property
    def guards(self) -> bool:
        """Whether there is a target at all."""
        return self.targets != (None, None)


def attained(slo: SloConfig, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Whether whoever felt this was inside both targets, as far as there are some; None misses none.

    >>> [attained(SloConfig(ttft_s=0.5, tpot_s=0.05), ttft_s, 0.04) for ttft_s in (0.5, 0.6)]
    [True, False]
    >>> attained(SloConfig(tpot_s=0.05), 9.0, None)
    True
    """
    pairs = ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s))
    return all(felt is None or target is None or felt <= target for felt, target in pairs)


_LEAST = 0.5
"""Share of a target for first tokens that is the engine's, however long the way to it: a gateway that stood still for a
moment would else be taken for engines that are too slow."""


def in_engine(slo: SloConfig, way_s: float) -> SloConfig:
    """The targets that the engine has to meet, where first tokens take `way_s` beside it.

    >>> [in_engine(SloConfig(ttft_s=0.5), way_s).ttft_s for way_s in (0.0, 0.125, 0.3)]
    [0.5, 0.375, 0.25]
    """
    if slo.ttft_s is None or not way_s:
        return slo
    return slo.model_copy(update={"ttft_s": max(_LEAST * slo.ttft_s, slo.ttft_s - way_s)})
