"""Request bodies of the HTTP API, as OpenAI's clients write them. A field that is not listed is refused by name.

Ranges are not checked here: the front end owns the table of limits, and its word comes back under the field's name. Fields that
cannot change an answer (who asks, how a provider bills, what it stores) are taken and have no effect.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictInt, Tag, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError

Unsigned32 = Annotated[StrictInt, Field(ge=0, lt=1 << 32)]
Number = Annotated[float, Field(allow_inf_nan=False)]

TOO_MANY = "too_many_faults"
"""The type of the one error that stands for more than MOST_NAMED."""
MOST_NAMED = 1000
"""Errors of one object that are looked at one by one: a small body can hold a million."""


class _Body(BaseModel):
    # A smallest length, even of 0, has pydantic look at the characters of every text and name: JSON's escapes can write halves of
    # surrogate pairs, which the gRPC API cannot carry.
    model_config = ConfigDict(extra="forbid", str_min_length=0)

    @model_validator(mode="wrap")
    @classmethod
    def _bounded(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(given)
        except ValidationError as error:
            if error.error_count() <= MOST_NAMED:
                raise
            raise PydanticCustomError(TOO_MANY, "has {count} faults, too many to name", {"count": error.error_count()}) from None


class StreamOptions(_Body):
    """include_usage: a last chunk with usage. continuous_usage_stats: usage in every chunk."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool | None = None


class Generation(_Body):
    """What both generating endpoints take."""

    model: str = ""
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Unsigned32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: StrictInt | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    stop: str | list[str] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    # beyond OpenAI, under the names that vLLM's users know
    top_k: StrictInt | None = Field(default=None, ge=-1, lt=1 << 32)
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Unsigned32 | None = None
    stop_token_ids: list[Unsigned32] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: list[Unsigned32] | None = None
    bad_words: list[str] | None = None
    return_token_ids: StrictBool | None = None
    priority: Literal["batch", "normal", "interactive"] | None = None
    cache_scope: str | None = None
    time_budget_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # taken, without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def _kind_of_prompt(given: Any) -> str | None:
    """The alternative that a prompt is read as: faults are told of what it holds, not of every kind that it is not."""
    if isinstance(given, str):
        return "Text"
    if not isinstance(given, list):
        return None
    first = given[0] if given else ""
    return "Lists" if isinstance(first, list) else "Ids" if isinstance(first, int) else "Texts"


Prompt = Annotated[
    Annotated[str, Tag("Text")] | Annotated[list[str], Tag("Texts")] | Annotated[list[Unsigned32], Tag("Ids")]
    | Annotated[list[list[Unsigned32]], Tag("Lists")],
    Discriminator(
        _kind_of_prompt, custom_error_type="prompt",
        custom_error_message="Input should be a text, several texts, the token ids of one prompt, or of several",
    ),
]  # fmt: skip


class CompletionRequest(Generation):
    """POST /v1/completions. prompt: a text, several, the token ids of one, or of several. max_tokens: 0 with echo gives the prompt alone;
    where it is not given it is 16, or more for min_tokens, or less for want of room."""

    prompt: Prompt
    max_tokens: Unsigned32 | None = 16
    logprobs: Unsigned32 | None = None
    echo: StrictBool = False
    suffix: None = None
    best_of: Unsigned32 | None = None

    @property
    def has_own_limit(self) -> bool:
        """Whether the caller said how long an output may be."""
        return "max_tokens" in self.model_fields_set

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt is all that is wanted, with its log-probabilities if at all."""
        return self.echo and self.max_tokens == 0

    @property
    def has_numbers(self) -> bool:
        """Whether the prompt is a list of prompts, which are told apart by their numbers."""
        return isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))


class TextPart(_Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    """One message. Images, audio and files in its content are refused: no model here takes them."""

    role: str
    content: str | Annotated[list[TextPart | dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[dict[str, Any]] | None = None
    audio: None = None
    function_call: None = None


class Function(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Body):
    """schema has the name that pydantic keeps for itself, hence the alias."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_tokens: Unsigned32 | None = None
    max_completion_tokens: Unsigned32 | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Unsigned32 | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None


class TokenizeRequest(_Body):
    """POST /tokenize: a text, or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str = ""
    tokens: list[Unsigned32]
