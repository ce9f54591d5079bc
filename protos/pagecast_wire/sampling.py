"""How a request wants its tokens chosen and when it wants to stop: effective values, defaults already applied."""

from enum import IntEnum

from msgspec import Struct


class FinishReason(IntEnum):
    """Why a sequence ended. One closed set for wire, core, API, logs and metrics."""

    STOP = 1  # end-of-sequence, a stop token id, or a stop text found by the front end
    LENGTH = 2  # max_output_tokens or max_model_len reached
    TIME_LIMIT = 3  # time_budget used up; the output so far is valid
    CANCELLED = 4  # the client, an operator or a vanished front end
    DEADLINE_EXCEEDED = 5  # the caller's deadline passed
    QUEUE_TIME_EXCEEDED = 6  # waited longer than max_queue_time, no token emitted
    NUMERIC_FAULT = 7  # the row's logits held NaN or infinity
    WORKER_LOST = 8  # recovery budget spent
    POISON_REQUEST = 9  # crashed a worker group alone


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Effective sampling values of one request.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: 64-bit; the random number of a token is a function of (seed, sequence index, position, vocabulary id) alone.
    Penalties follow the field's definitions: presence and frequency are subtracted from logits of *output* tokens,
    repetition divides (positive) or multiplies (negative) logits of prompt and output tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias_ids: bytes = b""  # u32 column of token ids
    logit_bias_values: bytes = b""  # f32 column, same length
    allowed_token_ids: bytes = b""  # u32 column; empty means all
    num_logprobs: int = -1  # -1: none; 0: the chosen token's; n: also the n best


class StopRules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token-level stop rules. Stop *texts* are matched by the front end and come back as `StopAt`.

    max_output_tokens counts from the end of the prompt. stop_token_ids holds every id that ends the sequence: the
    model's end tokens (unless ignore_eos) and the request's own; before min_output_tokens none of them can be sampled.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: bytes = b""  # u32 column
