"""The vLLM engine behind the few verbs that Nightshift needs; no other module of this package imports vllm."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.types import FinishReason, Sampling, VersionSpan
from services.generated import Generated

ROLLOUT_PRIORITY = 10
"""vLLM serves lower values first; users have 0."""
CANARY_PRIORITY = -10

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class GenerationError(RuntimeError):
    """The engine ended a sample without a result (aborted, or an output that cannot be read)."""


class VllmEngine:
    """Wraps one `AsyncLLM`; every method belongs to the event loop that the engine was started on."""

    def __init__(self, client: AsyncLLM) -> None:
        self._client = client

    @property
    def max_model_len(self) -> int:
        return int(self._client.model_config.max_model_len)

    @property
    def max_scored_tokens(self) -> int:
        """The engine refuses a prompt that leaves no room for one token."""
        return self.max_model_len - 1

    @property
    def vocab_size(self) -> int:
        return int(self._client.model_config.get_vocab_size())

    @property
    def dead(self) -> bool:
        """Whether the engine has ended for good: its processes are gone, or it met an error it cannot go on from."""
        return bool(self._client.errored)

    @property
    def dtype(self) -> str:
        """Of the weights in use, such as `float32`."""
        return str(self._client.model_config.dtype).removeprefix("torch.")

    async def generate_sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None) -> Generated:
        """Token ids in, token ids out, with the log-probabilities of the distribution that sampled.

        Cancelling the call aborts the request. Raises GenerationError.
        """
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt_ids)),
            stop_token_ids=list(sampling.stop_token_ids),
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._generated(await self._run(prompt_ids, params, priority=ROLLOUT_PRIORITY))

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """log p(token_j | tokens before j) at temperature 1, for j = 1 .. L - 1."""
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        output = await self._run(token_ids, params, priority=CANARY_PRIORITY)
        positions = output.prompt_logprobs or []
        if len(positions) != len(token_ids):
            raise GenerationError(f"asked for {len(token_ids)} prompt logprobs, got {len(positions)}")
        return tuple(float(p[t].logprob) for p, t in zip(positions[1:], token_ids[1:], strict=True))

    async def pause(self) -> None:
        """Stop stepping; requests in flight stay and are recomputed under the new weights on resume."""
        await self._client.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        """Load a Hugging Face directory in place; call while paused.

        No timeout is passed to the workers: a late reply would be taken for the result of the next step.
        """
        await self._client.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        if refresh_tied_head:
            await self._client.collective_rpc("refresh_tied_head")

    async def push_refusal(self, staging: Path) -> str:
        """Why the engine's first worker cannot receive a push with NCCL; empty when it can."""
        return str(await self._first_worker("push_refusal", staging=str(staging)))

    async def begin_receive(self, seat: dict[str, Any], files: list[list[Any]], directory: str) -> None:
        """Have the first worker receive an epoch in the background; no timeout, for the reason `reload` has none."""
        await self._client.collective_rpc(
            "begin_receive", kwargs={"seat": seat, "files": files, "directory": directory}
        )

    async def receive_state(self, epoch: int) -> dict[str, Any]:
        """`done` and `error` of what the first worker receives."""
        return dict(await self._first_worker("receive_state", epoch=epoch))

    async def set_version(self, version: int) -> None:
        """Label the tokens sampled from now on."""
        await self._client.update_weight_version(str(version))

    async def check_health(self) -> None:
        await self._client.check_health()

    async def _first_worker(self, method: str, **arguments: Any) -> Any:
        """What rank 0 answers; the others answer None."""
        answers = await self._client.collective_rpc(method, kwargs=arguments)
        return next(answer for answer in answers if answer is not None)

    async def _run(self, token_ids: Sequence[int], params: SamplingParams, *, priority: int) -> Any:
        prompt = tokens_input(list(token_ids))
        last = None
        async for output in self._client.generate(prompt, params, uuid.uuid4().hex, priority=priority):
            last = output
        if last is None or not last.finished:
            raise GenerationError("the engine ended the request without output")
        return last

    def _generated(self, output: Any) -> Generated:
        """Raises GenerationError unless there are an end reason, one logprob a token and spans over all tokens."""
        completion = output.outputs[0]
        if (reason := _FINISH.get(completion.finish_reason)) is None:
            raise GenerationError(f"sample ended with {completion.finish_reason!r}")
        ids = tuple(completion.token_ids)
        logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)[list(completion.logprobs.start_indices)]
        if len(logprobs) != len(ids):
            raise GenerationError(f"{len(ids)} tokens but {len(logprobs)} logprobs")
        spans = tuple(VersionSpan(int(s.version), s.start, s.end) for s in completion.weight_versions or ())
        spans = tuple(s for s in spans if s.stop > s.start)
        if sum(s.stop - s.start for s in spans) != len(ids):
            raise GenerationError(f"version spans {spans} do not cover {len(ids)} tokens")
        # once at the end: decoding token by token would cost the event loop more than the rest together
        text = self._client.get_tokenizer().decode(ids, skip_special_tokens=True)
        return Generated(ids, logprobs, spans, reason, text)
