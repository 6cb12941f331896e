"""The vLLM engine behind the few verbs that Nightshift needs; besides it only what runs in its processes has vllm."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.errors import WeightsError
from rollout.types import FinishReason, Partial, Sampling
from services.adapters import Adapter
from services.breaks import Pace
from services.cache_salt import salted
from services.engine_output import GenerationError, part, partial
from services.priorities import CANARY, ROLLOUT, ROLLOUT_BESIDE
from services.step_log import StepLog
from services.step_room import StepRoom
from services.user_window import RequestTimes

_log = structlog.get_logger(__name__)

_OWN = "nightshift-"
"""How the ids of requests begin that are not users'; OpenAI routes make ids of their own."""
USER_ADAPTER = 1
"""Number of the adapter that users are on; those of rollouts come after it."""

_CUT_AGAIN_S = _LOOK_S = 0.005
_ASK_S = 0.1
"""Between two questions to the workers, each of which is heard between two of their steps."""
_REST_SHARE = 0.1
"""Of the time in which weights are to be prepared, for rests beside users."""


class VllmEngine:
    """Wraps one `AsyncLLM`; every method belongs to the event loop that the engine was started on."""

    def __init__(self, client: AsyncLLM, room: StepRoom) -> None:
        """`client` must keep statistics (`disable_log_stats` is false), and was started with `room` to be found."""
        self._client = client
        self.step_room = room
        self._loads = 0
        self._prepared: Path | None = None
        self.rollouts_give_way = True
        """Whether they are left out of steps that compute users' prompts, which those who begin from now on are."""
        self.crowded: Callable[[], bool] = lambda: False
        """Whether users leave no room for anything else now, not for weights that are prepared either."""
        self.step_log = StepLog(own=(_OWN,))
        self.user_adapter: Adapter | None = None
        """What users are on; None for the model itself."""
        client.logger_manager.stat_loggers.append(self.step_log)

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

    def cached_prefix(self, size: int) -> int:
        """The whole blocks of a prompt of `size` tokens, without its last one, which is always computed."""
        cache = self._client.vllm_config.cache_config
        return (size - 1) // cache.block_size * cache.block_size if cache.enable_prefix_caching else 0

    @property
    def dead(self) -> bool:
        """Whether the engine has ended for good: its processes are gone, or it met an error it cannot go on from."""
        return bool(self._client.errored)

    @property
    def steps(self) -> int:
        """Steps whose outcome has arrived here; no word to the engine is needed for it."""
        return self.step_log.steps

    @property
    def in_hand(self) -> int:
        """Requests that are not at their end, those waiting for a seat included."""
        return int(self._client.get_num_unfinished_requests())

    @property
    def dtype(self) -> str:
        """Of the weights in use, such as `float32`."""
        return str(self._client.model_config.dtype).removeprefix("torch.")

    @property
    def loads(self) -> int:
        """How often other weights came into it."""
        return self._loads

    def users(self) -> dict[str, RequestTimes]:
        """The sequences of users in the engine now, by the engine client's ids."""
        states, ahead = self._client.output_processor.request_states, _ahead()
        return {
            name: _times(state, ahead)
            for name, state in states.items()
            if state.stats is not None and not state.external_req_id.startswith(_OWN)
        }

    def times(self, request_id: str) -> list[RequestTimes]:
        """Of a request's sequences, here or ended a moment ago. OpenAI routes put words of their own around the id."""
        processor, ahead = self._client.output_processor, _ahead()
        names = [name for outer, inner in processor.external_req_ids.items() if request_id in outer for name in inner]
        found = [processor.request_states[name] for name in names if name in processor.request_states]
        here = [_times(state, ahead) for state in found if state.stats is not None]
        return [*here, *self.step_log.ended.of(request_id)]

    def begin(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None,
        since: int | None = None,
        adapter: Adapter | None = None,
    ) -> "VllmGeneration":
        """Token ids in, token ids out, with the log-probabilities of the distribution that sampled. What was computed
        of the prompt by requests begun `since` so many `loads` is used; None: of as many as there are."""
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
        priority = ROLLOUT if self.rollouts_give_way else ROLLOUT_BESIDE
        return VllmGeneration(self._client, self._prompt(prompt_ids, since), params, priority, adapter)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens skipped. Once at the end of a sample: token by token it would cost the event loop more than
        all else."""
        return str(self._client.get_tokenizer().decode(list(token_ids), skip_special_tokens=True))

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> tuple[float, ...]:
        """log p(token_j | tokens before j) at temperature 1, for j = 1 .. L - 1."""
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        prompt = self._prompt(token_ids)
        output = await _last(self._client, prompt, params, _own_id(), priority=CANARY, adapter=adapter)
        positions = output.prompt_logprobs or []
        if len(positions) != len(token_ids):
            raise GenerationError(f"asked for {len(token_ids)} prompt logprobs, got {len(positions)}")
        return tuple(float(p[t].logprob) for p, t in zip(positions[1:], token_ids[1:], strict=True))

    async def probe(self) -> None:
        """Have it sample one token. Raises GenerationError, or what vLLM raises."""
        params = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        output = await _last(self._client, self._prompt((0,)), params, _own_id(), priority=CANARY)
        if not output.outputs[0].token_ids:
            raise GenerationError("the engine ended a probe without a token")

    async def pause(self) -> None:
        """Stop stepping, for other weights to come; requests in flight stay and go on with the keys and values that
        they have, so that nobody waits for those to be computed anew. Later requests find none of them."""
        # not `pause_generation`, which sleeps 20 ms after it for outputs to arrive in an order that nothing here needs
        await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._loads += 1

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None:
        """Have the workers load a directory beside the weights in use, see `weights_ahead`; with rests while users are
        in the engine, and as long as it is crowded."""
        how = {"refresh_tied_head": refresh_tied_head, "rest_s": _REST_SHARE * within_s, "pace": self._pace()}
        self._prepared, until, over = directory, time.monotonic() + within_s, False
        await self._client.collective_rpc("prepare_weights", kwargs={"directory": str(directory), **how})
        while not over:
            if not wanted() or time.monotonic() > until:
                self._prepared = None
                await self._client.collective_rpc("abandon_prepared")
                return
            await asyncio.sleep(_ASK_S)
            over = all(state for state, _ in await self._client.collective_rpc("prepared", args=(self._pace(),)))

    def _pace(self) -> int:
        """A `Pace`, of what is done beside users."""
        return int(Pace.HELD if self.crowded() else Pace.GENTLE if self.users() else Pace.FREE)

    async def first_tokens(self, *, within_s: float) -> None:
        """Returns when no user waits for a first token, or so many seconds later."""
        until = time.monotonic() + within_s
        while any(user.first is None for user in self.users().values()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def uncrowded(self, *, within_s: float, wanted: Callable[[], bool]) -> None:
        """Returns when users are no crowd, so many seconds later, or when it is no longer `wanted`."""
        until = time.monotonic() + within_s
        while self.crowded() and wanted() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_ASK_S)

    async def put_back(self) -> None:
        """Have no second model; the first one is in use again, with whatever weights it has."""
        self._prepared = None
        await self._client.collective_rpc("put_back")

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None:
        """Load a Hugging Face directory in place, or change over to it where it was prepared; call while paused. Raises
        WeightsError with what workers met.

        No timeout is passed to the workers: a late reply would be taken for the result of the next step.
        """
        prepared, self._prepared = self._prepared, None
        if prepared == directory and await self._take(directory):
            return
        arguments = {"directory": str(directory), "refresh_tied_head": refresh_tied_head}
        answers = await self._client.collective_rpc("load_in_place", kwargs=arguments)
        if met := [str(error) for error in answers if error]:
            raise WeightsError("; ".join(met))

    async def _take(self, directory: Path) -> bool:
        """Change over to what is prepared, in all workers or for good in none."""
        answers = await self._client.collective_rpc("take_prepared", kwargs={"directory": str(directory)})
        if why := next((str(answer) for answer in answers if answer), ""):
            _log.info("weights_not_prepared", directory=str(directory), why=why)
        return not why

    async def load_adapter(self, adapter: Adapter) -> float:
        """While requests go on; returns how long the engine stood still for it, in seconds. No timeout, for the reason
        `reload` has none. Raises WeightsError with what workers met; others may have it then, until it is unloaded."""
        arguments = {"name": adapter.name, "number": adapter.number, "directory": str(adapter.directory)}
        answers = await self._client.collective_rpc("load_adapter", kwargs=arguments)
        if met := [str(error) for _, error in answers if error]:
            raise WeightsError("; ".join(met))
        return max(float(seconds) for seconds, _ in answers)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """From all workers, those included that never had it."""
        await self._client.remove_lora(adapter.number)

    async def adapter_layers(self) -> frozenset[str]:
        """Last parts of the names of the layers that an adapter can change here, as model files have them."""
        return frozenset(await self._first_worker("adapter_layers"))

    async def load_user_adapter(self, name: str, directory: Path) -> LoRARequest:
        """Into a place that it keeps for good; what users' requests have to carry."""
        request = LoRARequest(name, USER_ADAPTER, str(directory))
        await self._client.add_lora(request)
        await self._client.pin_lora(USER_ADAPTER)
        self.user_adapter = Adapter(USER_ADAPTER, version=0, directory=directory)
        return request

    async def push_refusal(self, staging: Path) -> str:
        """Why the engine's first worker cannot receive a push with NCCL; empty when it can."""
        return str(await self._first_worker("push_refusal", staging=str(staging)))

    async def begin_receive(self, seat: dict[str, Any], files: list[list[Any]], directory: str) -> None:
        """Have the first worker receive an epoch in the background; no timeout, for the reason `reload` has none."""
        if met := await self._first_worker("begin_receive", seat=seat, files=files, directory=directory):
            raise WeightsError(f"epoch {seat['epoch']}: {met}")

    async def receive_state(self, epoch: int) -> dict[str, Any]:
        """`done` and `error` of what the first worker receives."""
        return dict(await self._first_worker("receive_state", epoch=epoch))

    async def set_version(self, version: int) -> None:
        """Label the tokens sampled from now on."""
        await self._client.update_weight_version(str(version))

    def _prompt(self, token_ids: Sequence[int], since: int | None = None) -> Any:
        return tokens_input(list(token_ids), cache_salt=salted(self._loads if since is None else since))

    async def _first_worker(self, method: str, **arguments: Any) -> Any:
        """What rank 0 answers; the others answer None."""
        answers = await self._client.collective_rpc(method, kwargs=arguments)
        return next(answer for answer in answers if answer is not None)


class VllmGeneration:
    """One rollout sample in the engine; see `sample_run.Generation`."""

    def __init__(
        self, client: AsyncLLM, prompt: Any, params: SamplingParams, priority: int, adapter: Adapter | None
    ) -> None:
        self._client = client
        self._prompt = prompt
        self._params = params
        self._priority = priority
        self._adapter = adapter
        self._id = _own_id()
        self._ended = asyncio.Event()
        self._cut = False
        self._size = self.reused = 0

    async def ended(self) -> Partial | None:
        """Raises GenerationError."""
        try:
            output = await _last(
                self._client,
                self._prompt,
                self._params,
                self._id,
                priority=self._priority,
                adapter=self._adapter,
            )
        finally:
            self._ended.set()
        self.reused = max(0, output.num_cached_tokens or 0)
        found = partial(output, self._version)
        if not self._cut and (found is None or not found.finished):
            raise GenerationError("the engine aborted a sample")
        return found

    @property
    def size(self) -> int:
        if (state := self._state()) is not None:
            self._size = int(state.detokenizer.num_output_tokens())
        return self._size

    def so_far(self, start: int = 0) -> Partial | None:
        """From the engine client's own record of the request, which grows token by token."""
        state = self._state()
        if state is None or self.size <= start:
            return None
        flat = state.logprobs_processor.logprobs
        ids, logprobs = (
            state.detokenizer.output_token_ids[start:],
            [flat.logprobs[i] for i in flat.start_indices[start:]],
        )
        with suppress(GenerationError, ValueError):  # what cannot be read now fails the sample when it ends
            labels = state._weight_version_spans()
            return part(ids, logprobs, labels, self._version, FinishReason.ABORT, start=start)
        return None

    async def cut(self) -> None:
        self._cut = True
        while not self._ended.is_set():
            await self._client.abort(self._id)
            with suppress(TimeoutError):  # it may be on its way into the engine, which does not know it yet
                async with asyncio.timeout(_CUT_AGAIN_S):
                    await self._ended.wait()

    @property
    def _version(self) -> int | None:
        """Of its adapter."""
        return None if self._adapter is None else self._adapter.version

    def _state(self) -> Any:
        """The engine client's own record of the request; None before it has one and after its end."""
        processor = self._client.output_processor
        names = processor.external_req_ids.get(self._id)
        return processor.request_states.get(names[0]) if names else None


def _own_id() -> str:
    return _OWN + uuid.uuid4().hex


def _ahead() -> float:
    """Of the wall clock, by which the engine client notes arrivals, to the other one, by which it notes tokens."""
    return time.monotonic() - time.time()


def _times(state: Any, ahead: float) -> RequestTimes:
    stats = state.stats
    first, last = stats.first_token_ts or None, stats.last_token_ts or None
    prompt = state.prompt_len - max(0, state.num_cached_tokens)
    arrived, tokens = stats.arrival_time + ahead, stats.num_generation_tokens
    return RequestTimes(arrived, first, last, tokens, prompt, state.external_req_id)


async def _last(
    client: AsyncLLM,
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    *,
    priority: int,
    adapter: Adapter | None = None,
) -> Any:
    """The request's final output. Cancelling aborts it. Raises GenerationError."""
    last = None
    # vLLM keeps computed prefixes apart by the adapter's name and directory
    lora = None if adapter is None else LoRARequest(adapter.name, adapter.number, str(adapter.directory))
    async for output in client.generate(prompt, params, request_id, lora_request=lora, priority=priority):
        last = output
    if last is None or not last.finished:
        raise GenerationError("the engine ended the request without output")
    return last
