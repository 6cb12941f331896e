"""How long an engine's steps take: what a simulated replica knows of its hardware and its model."""

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from pydantic import Field, field_validator

from deploy.simulation.json_file import read_json
from rollout.config import Settings
from services.idle_speed import IdleSpeed

_MOST_SPREAD = 3
"""Of the way's logarithm: one user in forty then takes more than 300 times as long as the median one."""
_PROBE_PROMPT, _PROBE_TOKENS = 24, 16
"""Tokens, as `services.idle_speed` measures."""


class WorkShape(Settings):
    """Rollouts: groups of samples of one prompt; sizes in tokens are drawn evenly between two bounds."""

    group: int = Field(default=8, ge=1)
    prompt_tokens: tuple[int, int] = (64, 256)
    tokens: tuple[int, int] = (64, 256)
    """Of each sample of a group, the same for all of them."""

    def sampled(self, n: int, max_tokens: int) -> "WorkShape":
        """Groups of `n` samples, none longer than `max_tokens`.

        >>> WorkShape(tokens=(64, 256)).sampled(16, 128)
        WorkShape(group=16, prompt_tokens=(64, 256), tokens=(64, 128))
        """
        low, high = (min(bound, max_tokens) for bound in self.tokens)
        return self.model_copy(update={"group": n, "tokens": (low, high)})

    @property
    def under_way(self) -> float:
        """Prompt and response tokens that a sample in the engine has at any time, on average. Longer ones are there for
        longer, so that of the responses it is half of E[tokens^2] / E[tokens].

        >>> WorkShape(prompt_tokens=(100, 100), tokens=(50, 50)).under_way
        125.0
        """
        low, high = self.tokens
        squares = (low * low + low * high + high * high) / 3
        return sum(self.prompt_tokens) / 2 + squares / (low + high)

    @field_validator("prompt_tokens", "tokens")
    @classmethod
    def _ordered(cls, bounds: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(f"({bounds[0]}, {bounds[1]}) are no bounds of a number of tokens")
        return bounds


class EngineModel(Settings):
    """One engine. The default was measured with a 48 M-parameter bf16 policy on two cores."""

    decode_s: tuple[tuple[int, float], ...] = (
        (1, 0.017),
        (4, 0.023),
        (8, 0.025),
        (16, 0.034),
        (32, 0.044),
        (64, 0.093),
    )
    """(rollouts, seconds of a step that gives each a token); straight lines between, and on beyond the last."""
    user_part: float = Field(default=1.0, gt=0, le=8)
    """Of a rollout, that a user counts as in a step: a sequence takes longer the more tokens it has already."""
    prefill_token_s: float = Field(default=0.0004, ge=0)
    """Seconds that each prompt token adds to its step."""
    batched_tokens: int = Field(default=2048, ge=16)
    """Most tokens of one step where `fleet.engine.max_num_batched_tokens` does not say; longer prompts are computed in
    parts."""
    door_s: float = Field(default=0.01, ge=0)
    """From a user to the engine and back: gateway, router, tokenizer."""
    door_spread: float = Field(default=0.1, ge=0, le=_MOST_SPREAD)
    """Standard deviation of the logarithm of that way."""
    door_user_s: float = Field(default=0.0, ge=0)
    """More of it for each user in the engine: their requests and streams share gateway and cores. Rollouts pass neither
    gateway nor router."""
    door_user_spread: float = Field(default=0.0, ge=0, le=1)
    """More of `door_spread` for each of them."""
    drift: float = Field(default=0.05, ge=0, le=3)
    """Standard deviation of the logarithm of the engine's slowness, which changes every `drift_s`."""
    drift_s: float = Field(default=2.0, gt=0)
    pause_s: float = Field(default=0.03, ge=0)
    """Generation stands still for so long at each push; rollouts are prefilled again after it."""
    arrive_s: float = Field(default=0.0, ge=0)
    """New weights are on their way into the engine for so long before each pause."""
    arrive_slowness: float = Field(default=1.0, ge=1)
    """How many times as long steps take meanwhile: what receives and checks weights may share its cores and memory."""
    start_s: float = Field(default=60.0, ge=0)
    """Until a new replica serves."""
    switch_s: float | None = Field(default=None, gt=0)
    """Of a replica that is lent: until rollouts have it once its last user has left, and until users have it again once
    it is called back, both together. None: as `fleet.lending.switch_s` says."""
    adapter_slowness: float = Field(default=2.0, ge=1)
    """With `sharing.mode = "adapter"`: how many times as long a step takes in which some sequences are on an adapter.
    The default was measured with half of a batch on one."""
    work: WorkShape = WorkShape()
    """What rollouts are like; with a trainer its `train.sampling` says how many samples a group has, and how long they
    are at most."""

    @field_validator("decode_s")
    @classmethod
    def _rising(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if not points or points[0][0] < 1 or points[0][1] <= 0:
            raise ValueError("decode_s needs points (sequences >= 1, seconds > 0)")
        for (few, short), (many, long) in pairwise(points):
            if many <= few or long < short:
                raise ValueError(f"decode_s: ({many}, {long:g}) after ({few}, {short:g}); both have to rise")
        return points

    def way_s(self, users: float) -> float:
        """Median of the way from a user to the engine and back, beside so many other users of it."""
        return self.door_s + self.door_user_s * users

    def way_spread(self, users: float) -> float:
        """Standard deviation of the logarithm of that way, at most 3.

        >>> crowded = EngineModel(door_spread=0.1, door_user_spread=0.05)
        >>> [round(crowded.way_spread(users), 2) for users in (0, 4, 512)]
        [0.1, 0.3, 3]
        """
        return min(_MOST_SPREAD, self.door_spread + self.door_user_spread * users)

    def step_tokens(self, given: int | None) -> int:
        """Most of one step, where the settings say `given`."""
        return given or self.batched_tokens

    def step_s(self, rollouts: float, users: float = 0.0, *, prefill: float = 0.0) -> float:
        """Seconds of a step that gives so many sequences a token and computes `prefill` tokens of prompts.

        >>> model = EngineModel(decode_s=((1, 0.02), (11, 0.04)), user_part=0.5, prefill_token_s=0.001)
        >>> [round(model.step_s(*batch), 6) for batch in ((1,), (6,), (0, 1), (0, 12), (2, 8))]
        [0.02, 0.03, 0.02, 0.03, 0.03]
        >>> round(model.step_s(21, prefill=5), 6)
        0.065
        """
        return self._decode_s(max(1.0, rollouts + self.user_part * users)) + self.prefill_token_s * prefill

    def batch_of(self, seconds: float) -> float:
        """Rollouts whose step takes so long, at least one: the other way round; as few as there can be.

        >>> model = EngineModel(decode_s=((1, 0.02), (11, 0.04), (21, 0.04), (31, 0.06)))
        >>> [round(model.batch_of(seconds), 6) for seconds in (0.01, 0.03, 0.04, 0.05, 0.08)]
        [1.0, 6.0, 11.0, 26.0, 41.0]
        """
        found = 1.0
        for (few, short), (many, long) in pairwise(self.decode_s):
            if seconds <= short:
                break
            if long > short:
                found = few + (many - few) * (seconds - short) / (long - short)
        return found

    def _decode_s(self, batch: float) -> float:
        points = self.decode_s
        if len(points) == 1:
            return points[0][1]
        place = min(max(1, bisect_right(points, batch, key=_size)), len(points) - 1)
        (few, short), (many, long) = points[place - 1], points[place]
        return max(points[0][1], short + (long - short) * (batch - few) / (many - few))

    def idle_speed(self, seats: int) -> IdleSpeed:
        """What a replica would measure of it at its start."""
        first, token = self.step_s(1, prefill=_PROBE_PROMPT), self.step_s(1)
        alone_s = first + (_PROBE_TOKENS - 1) * token
        # as short as a user's
        together_s = self.step_s(1, prefill=seats * _PROBE_PROMPT) + (_PROBE_TOKENS - 1) * self.step_s(0, seats)
        capacity = min(float(seats), max(1.0, seats * alone_s / together_s))
        return IdleSpeed(first, token, capacity, self.prefill_token_s)


def _size(point: tuple[int, float]) -> int:
    return point[0]


def read_engine(path: Path) -> EngineModel:
    """An engine as `--calibrate` writes it. Raises ConfigError."""
    return read_json(path, EngineModel)
