"""Bodies of the users' OpenAI routes: what a client may set. Settings that would reach into other people's requests
(priority, request ids, cache transfer, pickled embeddings, own chat templates, beam search) are not among them.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from services.strict_body import StrictBody

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_BIASES = 300
MAX_CACHE_SALT = 128
_NOT_IN_CACHE_SALT = "@/\\\0"

DROPPED = frozenset({"priority", "kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "vllm_xargs"})
"""Removed without complaint: engine settings that some clients send by habit and that no user may choose."""

TEMPLATE_SETTINGS = frozenset(
    {
        *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length", "kwargs"),
    }
)
"""Arguments of the rendering itself: not variables of the model's template, so no user gives them as such."""


def _check_template_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    if refused := sorted(TEMPLATE_SETTINGS & (variables or {}).keys()):
        raise ValueError(f"{', '.join(refused)} cannot be set; variables of the model's chat template can")
    return variables


def _check_cache_salt(salt: str) -> str:
    """vLLM's own rule; it would refuse the request later, in words about itself."""
    if found := sorted(set(salt) & set(_NOT_IN_CACHE_SALT)):
        raise ValueError(f"must not contain {' '.join(map(repr, found))}; none of @ / \\ NUL may stand in it")
    return salt


def _check_biases(value: Any) -> Any:
    """Before their values are looked at: a parser goes on through all of a dictionary, and keeps an error for each."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} tokens, at most {MAX_BIASES} may have a bias")
    return value


Hint = Annotated[Any, Field(exclude=True)]
"""Parameters of the OpenAI SDK that mean nothing to these engines: accepted whatever their value, and not passed on."""
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_template_variables)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT), AfterValidator(_check_cache_salt)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
"""The engine looks for each in the answer at every token."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class StreamOptions(StrictBody):
    """OpenAI's stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Hint = None


class _UserBody(StrictBody):
    model: str | None = None
    """The only model where it is left out."""
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_biases)] = Field(
        default=None, json_schema_extra={"maxProperties": MAX_BIASES}
    )
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = Field(default=None, max_length=255)


class CompletionBody(_UserBody):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "doorlike ->\n", "max_tokens": 13}]})

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Tokens
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1)]
    )
    max_tokens: int | None = Field(default=None, ge=0)
    """0 only with `echo`: the prompt's own logprobs."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int | None, Field(ge=1, exclude=True)] = None
    """Equal to `n`: candidates are not ranked."""

    @property
    def prompts(self) -> list[Any]:
        batched = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if batched else [self.prompt]


def _only_text(part: dict[str, Any]) -> dict[str, Any]:
    """A text part without its further keys: an engine takes `image_url` beside a text for an image to fetch."""
    return {key: part[key] for key in ("type", "text") if key in part} if part.get("type") == "text" else part


TextPart = Annotated[dict[str, Any], AfterValidator(_only_text)]
"""Parts that are not text stay as they are, to be refused in the words of `rollout.messages`."""


class ChatMessage(BaseModel):
    """One message. Further keys are dropped: clients send an answer back with all that it came with (`annotations`,
    `audio`), and an engine is given nothing that is not looked at here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatBody(_UserBody):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}]}
    )

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the model's chat template, such as Qwen3's `enable_thinking`."""
    modalities: Annotated[Annotated[list[Literal["text"]], Field(fail_fast=True)] | None, Field(exclude=True)] = None
    store: Hint = None
    metadata: Hint = None
    service_tier: Hint = None
    reasoning_effort: Hint = None
    verbosity: Hint = None
    prediction: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    safety_identifier: Hint = None
