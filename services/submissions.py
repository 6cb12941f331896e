"""From the body of POST /v1/rollouts to queue requests: every bound that depends on the fleet's settings. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.rewards import BUILTIN, refused_dataset
from rollout.types import MIN_TEMPERATURE, Purpose, RewardSpec, RolloutRequest, Sampling
from services.api_errors import ApiError, over_limit
from services.config import FleetConfig, LimitsConfig
from services.schemas import RewardBody, SamplingBody, SubmitBody
from services.tokenizer import TokenisedPrompt

MAX_KEY_CHARS = 255
_DEFAULT_MAX_TOKENS = 256
_ID_SEPARATOR = "~"


def check_bounds(body: SubmitBody, fleet: FleetConfig) -> None:
    """Everything that needs no tokens; raises ApiError 422."""
    limits = fleet.gateway.limits
    count, most = len(body.all_prompts), min(limits.max_prompts, limits.max_depth)
    if count > most:
        knob = "gateway.limits.max_prompts" if most == limits.max_prompts else "gateway.limits.max_depth"
        raise over_limit(422, "prompts", f"{count} long", most, knob)
    if body.n > limits.max_n:
        raise over_limit(422, "n", body.n, limits.max_n, "gateway.limits.max_n")
    asked = body.sampling.max_tokens
    if asked is not None and asked > limits.max_tokens:
        raise over_limit(422, "sampling.max_tokens", asked, limits.max_tokens, "gateway.limits.max_tokens")
    _check_trainable(body)
    _check_metadata(body, limits)
    if body.reward:
        _check_reward(body.reward, fleet)


def _check_reward(reward: RewardBody, fleet: FleetConfig) -> None:
    functions = {**BUILTIN, **{name: entry.function for name, entry in fleet.rewards.functions.items()}}
    if reward.name not in functions:
        message = f"reward.name: no reward {reward.name!r}; known are {', '.join(sorted(functions))}"
        raise ApiError(422, message, code="unknown_reward", param="reward.name")
    if why := refused_dataset(functions[reward.name], reward.params):
        raise ApiError(422, f"reward.params.dataset: {why}", code="refused_dataset", param="reward.params.dataset")


def _check_trainable(body: SubmitBody) -> None:
    """A trainer reproduces the logprobs of whole distributions only and would end other groups as dead."""
    if body.purpose != "train":
        return
    wanted: dict[str, tuple[float, bool, str]] = {
        "temperature": (
            body.sampling.temperature,
            body.sampling.temperature >= MIN_TEMPERATURE,
            f"at least {MIN_TEMPERATURE}",
        ),
        "top_p": (body.sampling.top_p, body.sampling.top_p == 1, "1"),
        "top_k": (body.sampling.top_k, body.sampling.top_k == 0, "0"),
    }
    for name, (value, good, needed) in wanted.items():
        if not good:
            message = f"sampling.{name}: {value} does not fit purpose train, which needs {needed}"
            raise ApiError(422, message, code="not_trainable", param=f"sampling.{name}")


def _check_metadata(body: SubmitBody, limits: LimitsConfig) -> None:
    if isinstance(body.metadata, list):
        own, shared = {f"metadata.{i}": _bytes(entry) for i, entry in enumerate(body.metadata)}, {}
    else:
        own, shared = {}, {"metadata": _bytes(body.metadata)}
    if body.reward:
        shared["reward.params"] = _bytes(body.reward.params)
    for field, size in {**own, **shared}.items():
        if size > limits.max_metadata_bytes:
            raise over_limit(
                422, field, f"{size} bytes", limits.max_metadata_bytes, "gateway.limits.max_metadata_bytes"
            )
    _check_copies(shared, len(body.all_prompts), limits)


def _check_copies(shared: Mapping[str, int], prompts: int, limits: LimitsConfig) -> None:
    """What all prompts share is kept with each of them, and a small body could fill the store."""
    copies = prompts * sum(shared.values())
    if copies > limits.max_body_bytes:
        message = f"{copies} bytes, with a copy for each of {prompts} prompts"
        raise over_limit(422, " and ".join(shared), message, limits.max_body_bytes, "gateway.limits.max_body_bytes")


def _bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def check_context(field: str, prompt_tokens: int, max_tokens: int, max_model_len: int, *, status: int) -> None:
    """A prompt and its response must fit the model; raises ApiError."""
    if prompt_tokens + max_tokens > max_model_len:
        message = (
            f"{field}: {prompt_tokens} prompt tokens and max_tokens={max_tokens} make {prompt_tokens + max_tokens}, "
            f"over the model's context of {max_model_len} (engine.max_model_len)"
        )
        raise ApiError(status, message, code="context_length_exceeded", param=field)


def check_stop_tokens(body: SubmitBody, vocab_size: int) -> None:
    """Raises ApiError 422 for one outside the vocabulary."""
    for token in body.sampling.stop_token_ids:
        if token >= vocab_size:
            message = f"sampling.stop_token_ids: {token} is not below the model's vocabulary size of {vocab_size}"
            raise ApiError(422, message, code="over_limit", param="sampling.stop_token_ids")


def to_requests(body: SubmitBody, prompts: Sequence[TokenisedPrompt], fleet: FleetConfig) -> list[RolloutRequest]:
    """One request per prompt; raises ApiError 422 when one does not fit the context."""
    reward = RewardSpec(body.reward.name, body.reward.params) if body.reward else None
    expires_in = None if body.deadline_s is None else max(1, round(body.deadline_s * 1000))
    requests = []
    for i, prompt in enumerate(prompts):
        field = "prompt" if body.prompts is None else f"prompts.{i}"
        requests.append(
            RolloutRequest(
                prompt_ids=prompt.ids,
                prompt_text=prompt.text,
                n=body.n,
                sampling=_sampling(body.sampling, field, len(prompt.ids), fleet),
                reward=reward,
                purpose=Purpose(body.purpose),
                tenant=body.tenant,
                metadata=body.metadata_of(i),
                expires_in_ms=expires_in,
            )
        )
    return requests


def _sampling(settings: SamplingBody, field: str, prompt_tokens: int, fleet: FleetConfig) -> Sampling:
    """For one prompt: what is asked for must fit beside it, the default is cut to what does."""
    longest = fleet.engine.max_model_len
    check_context(field, prompt_tokens, settings.max_tokens or 1, longest, status=422)
    default = min(_DEFAULT_MAX_TOKENS, fleet.gateway.limits.max_tokens, longest - prompt_tokens)
    return Sampling(
        max_tokens=settings.max_tokens or default,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_token_ids=tuple(settings.stop_token_ids),
        seed=settings.seed,
    )


def body_digest(body: Any) -> str:
    """Of a parsed JSON body, whatever its spacing and key order."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_key(key: str | None) -> str | None:
    """An Idempotency-Key as it was sent; raises ApiError 422."""
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        message = f"Idempotency-Key: {len(key)} characters; 1 to {MAX_KEY_CHARS} printable ASCII ones are allowed"
        raise ApiError(422, message, code="bad_header", param="Idempotency-Key")
    return key


def queue_key(key: str) -> str:
    """By which the queue knows a client's key. Every key of the trainer's (`feed:...`, `eval:...`) has a colon, so a
    client's that has one gets a name of its own; all others are the same in the queue, as gateways always had them.

    >>> queue_key("feed:default:0"), queue_key("k1")
    ('http:feed:default:0', 'k1')
    """
    return f"http:{key}" if ":" in key else key


def public_id(run: str, submission_id: str) -> str:
    """Names a submission across runs; made of characters that stay as they are in a path."""
    return f"{run}{_ID_SEPARATOR}{submission_id}"


def split_id(rollout_id: str) -> tuple[str, str] | None:
    """Run and submission id; None for what no gateway gave out."""
    run, separator, submission_id = rollout_id.rpartition(_ID_SEPARATOR)
    return (run, submission_id) if separator and run and submission_id else None
