"""What calls return, as frozen values. Times are seconds. Field names are the API's; nothing here knows gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "time_limit", "constraint_complete", "unspecified"]
Phase = Literal["queued", "prefilling", "decoding", "paused_slow_consumer", "recovering", "stalled", "unspecified"]
ServingState = Literal["starting", "serving", "recovering", "stalled", "draining", "unspecified"]
Priority = Literal["batch", "normal", "interactive", "unspecified"]
HealthStatus = Literal["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. arguments: JSON text of an object, as the model wrote it; cut short if the output was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON Schema of its arguments; None takes none."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. role: "system", "user", "assistant", "tool", or another that the model's template knows.

    tool_calls: calls that an assistant's message made. tool_call_id: of a tool's message, the call that it answers.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_text: str = ""


@dataclass(frozen=True, slots=True)
class Effective:
    """The values that are really used, defaults applied. seed is the one drawn if none was given. logprobs, prompt_logprobs: None where
    none are delivered. tool_call_format, reasoning_format: what is read from the output, "" for nothing."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tool_call_format: str = ""
    reasoning_format: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. recomputed_tokens were computed again after a preemption or recovery and are never billed."""

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was accepted: until it first ran, until its first token, until its end."""

    queue: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream: the request is in the queue. truncated_prompt_tokens: dropped from the prompt, where that was allowed."""

    seq: int
    request_id: str
    model: str
    model_digest: str
    prompt_tokens: int
    queue_position: int
    effective: Effective
    truncated_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Nothing new to read, but the request lives. elapsed: seconds since accepted."""

    seq: int
    phase: Phase
    queue_position: int
    prefill_done: int
    prefill_total: int
    cached_prompt_tokens: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens of a position. token_bytes: what it stands for, as far as single tokens have bytes."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's own logits, before temperature, penalties and masks; None for a prompt's first.
    top: the likeliest tokens of the position, best first."""

    token_id: int
    logprob: float | None
    top: tuple[Alternative, ...]
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Records of prompt tokens from position first_position on; the first of all is of position 0. Before any Tokens."""

    seq: int
    first_position: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the sequence's tool call number index. The first piece has id and name; arguments of all, joined, are JSON text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output of one sequence: token ids from offset first_token_offset on, and text that is always complete characters.

    logprobs: one for each id, if asked for. reasoning_text and tool_calls: what was parsed out of the text, no part of `text`. raw_bytes:
    of these ids, if asked for.
    """

    seq: int
    sequence_index: int
    first_token_offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    raw_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One sequence is complete. matched_stop: the stop text or stop token id that ended it, None for another reason."""

    seq: int
    sequence_index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Completed:
    """Last event of a stream that ended well."""

    seq: int
    usage: Usage
    timings: Timings
    num_recoveries: int


Event = Accepted | Progress | PromptLogprobs | Tokens | SequenceFinished | Completed


@dataclass(frozen=True, slots=True)
class Sequence:
    """One whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole result of a request: every sequence of it. prompt_logprobs: one for each prompt token, if asked for."""

    request_id: str
    model: str
    model_digest: str
    effective: Effective
    sequences: tuple[Sequence, ...]
    usage: Usage
    timings: Timings
    num_recoveries: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    truncated_prompt_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sequence."""
        return self.sequences[0].token_ids


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a conversation becomes under the model's template."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit that the server enforces on a request; the names are ModelLimits' in model.proto."""

    max_model_len: int
    max_pool_tokens: int
    max_stop_texts: int
    max_stop_text_bytes: int
    max_stop_token_ids: int
    max_request_id_length: int
    max_message_bytes: int
    max_temperature: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_chat_messages: int
    max_cache_scope_length: int
    max_penalty: float
    max_repetition_penalty: float
    max_num_sequences: int
    max_logit_bias_tokens: int
    max_logit_bias: float
    max_allowed_token_ids: int
    max_bad_sequences: int
    max_bad_sequence_tokens: int
    max_logprobs: int
    max_prompt_logprobs_tokens: int
    max_constraint_bytes: int
    max_constraint_depth: int
    max_choices: int
    max_tools: int
    max_tools_bytes: int
    max_template_kwargs_bytes: int
    max_rendered_chars: int
    max_role_length: int
    max_duration_s: int
    min_progress_s: float
    max_progress_s: float
    max_labels: int
    max_label_key_length: int
    max_label_value_length: int
    max_credit_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. chat and prefix_cache: None if the server does not say. constraints: kinds of structured output.
    tool_call_format, reasoning_format: None where no form is known."""

    name: str
    architecture: str
    digest: str
    dtype: str
    num_parameters: int
    vocab_size: int
    kv_bytes_per_token: int
    quantization: str
    end_token_ids: tuple[int, ...]
    limits: Limits
    chat: bool | None
    prefix_cache: bool | None
    constraints: tuple[str, ...] = ()
    tool_call_format: str | None = None
    reasoning_format: str | None = None
    tokenizer_digest: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an instance is; docs/reference.md has every field of GetLoadResponse. num_running, num_waiting: sequences. kv_utilization:
    referenced share of the block pool, 0 to 1. The rest counts from the scheduler's start on; device_us: microseconds that steps have
    taken on the device of rank 0."""

    instance_id: str
    epoch: int
    state: ServingState
    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_referenced: int
    num_blocks_cached: int
    kv_utilization: float
    prefix_tokens_asked: int
    prefix_tokens_hit: int
    num_preemptions: int
    num_recoveries: int
    prompt_tokens: int
    output_tokens: int
    device_us: int


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block of tokens in the prefix cache. digest: SHA-256 over its tokens and all before them; parent: the digest before it, for a
    first block the seed of its namespace. token_ids: if they were asked for."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Changes of a prefix cache, in this order: cleared, removed, stored. sequence: number of the last change here.

    snapshot: forget everything known so far; this and what follows while snapshot_continues list all that is cached. cleared: everything
    cached before is gone. Give a watch the last of these to go on where another ended.
    """

    instance_id: str
    epoch: int
    sequence: int
    snapshot: bool
    snapshot_continues: bool
    cleared: bool
    removed: tuple[bytes, ...]
    stored: tuple[CachedBlock, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which server answers."""

    version: str
    instance_id: str
    epoch: int
