"""An engine replica's part without an engine: samples groups with the weights it was given, and scores them."""

from collections.abc import Sequence

import numpy as np
import torch
from sampler import Response, sample
from weight_history import Weights

from rollout.prompts import Prompt
from rollout.rewards import RewardInput, reasoning_gym
from rollout.types import Experience, FinishReason, Group, Purpose, Sample, Segment, Timings, VersionSpan
from trainer.config import TrainConfig
from trainer.feeder import request_of
from trainer.models import load_policy, load_tokenizer
from trainer.rows import FreshGroup


class Actor:
    """Holds a copy of the policy of its own."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises ModelError."""
        self._config = config
        self._model = load_policy(config.model.path, config.workers.dtype)
        self._tokenizer = load_tokenizer(config.model.path)
        self._version = 0

    @torch.no_grad()
    def load(self, version: int, weights: Weights) -> None:
        """Sample with these from now on. Raises KeyError when one is missing."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])
        self._version = version

    def groups(self, prompts: Sequence[Prompt], *, n: int, generator: torch.Generator) -> list[FreshGroup]:
        """A scored group of `n` samples of each prompt; all count as fresh, however old the weights are."""
        responses = sample(
            self._model,
            [prompt.prompt_ids for prompt in prompts],
            n=n,
            max_tokens=self._config.sampling.max_tokens,
            end_id=self._tokenizer.eos_token_id,
            generator=generator,
        )
        return [
            FreshGroup(self._experience(str(i), prompt, responses_G), (True,) * n)
            for i, (prompt, responses_G) in enumerate(zip(prompts, responses, strict=True))
        ]

    def _experience(self, group_id: str, prompt: Prompt, responses_G: Sequence[Response]) -> Experience:
        samples_G = tuple(self._sample(prompt, response) for response in responses_G)
        request = request_of(prompt, self._config, purpose=Purpose.TRAIN, n=len(responses_G), temperature=1.0)
        group = Group(
            samples_G,
            tuple(self._reward(prompt, one) for one in samples_G),
            ({},) * len(samples_G),
            "actor",
            Timings(0.0, 0.0, 0.0),
        )
        return Experience(group_id, request, group)

    def _sample(self, prompt: Prompt, response: Response) -> Sample:
        size = len(response.token_ids_T)
        segment = Segment(
            np.array(prompt.prompt_ids, np.int32),
            response.token_ids_T,
            response.logprobs_T,
            (VersionSpan(self._version, 0, size),),
            np.ones(size, np.uint8),
            FinishReason.STOP if response.ended else FinishReason.LENGTH,
        )
        return Sample((segment,), self._tokenizer.decode(response.token_ids_T.tolist(), skip_special_tokens=True))

    def _reward(self, prompt: Prompt, one: Sample) -> float:
        (segment,) = one.segments
        return reasoning_gym(
            RewardInput(
                prompt=prompt.prompt_text,
                completion=one.text,
                finish_reason=segment.finish_reason.value,
                metadata=prompt.metadata,
                params=self._config.reward.params,
                response_ids=tuple(segment.response_ids_T.tolist()),
            )
        )


def mean_reward(groups: Sequence[FreshGroup]) -> float:
    """Over all samples."""
    rewards = [reward for group in groups for reward in group.experience.group.rewards_G]
    return sum(rewards) / len(rewards)
