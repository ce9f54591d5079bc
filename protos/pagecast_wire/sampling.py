"""How a request wants its tokens chosen and when it wants to stop: effective values, defaults already applied."""

from enum import IntEnum

from msgspec import Struct

MAX_LOGPROBS = 20
"""Most probable tokens that can be asked for beside the chosen one."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16


class FinishReason(IntEnum):
    """Why a sequence ended. One closed set for wire, core, API, logs and metrics."""

    STOP = 1  # end-of-sequence, a stop token id, or a stop text found by the front end
    LENGTH = 2  # max_output_tokens or max_model_len reached
    TIME_LIMIT = 3  # time_budget used up; the output so far is valid
    CANCELLED = 4  # the client left, or its front end vanished
    DEADLINE_EXCEEDED = 5  # the caller's deadline passed
    QUEUE_TIME_EXCEEDED = 6  # waited longer than max_queue_time, no token emitted
    NUMERIC_FAULT = 7  # the row's logits held NaN or infinity
    WORKER_LOST = 8  # recovery budget spent
    POISON_REQUEST = 9  # crashed a worker group alone
    CONSTRAINT_FAILED = 10  # the structured output, or the token rules, cannot be followed: `Finished.constraint_fault` says why
    CANCELLED_BY_API = 11  # CancelGeneration
    CANCELLED_BY_ADMIN = 12  # CancelRequests
    STEP_MEMORY = 13  # a step of this request alone did not fit the device's memory


class ConstraintKind(IntEnum):
    """What `Constraint.text` holds."""

    JSON_SCHEMA = 1  # a JSON Schema, as JSON text
    JSON_OBJECT = 2  # any JSON object; the text is empty
    REGEX = 3  # a regular expression of Rust's syntax that the whole output matches
    CHOICES = 4  # a JSON array of distinct, non-empty strings, one of which is the output
    GRAMMAR = 5  # a context-free grammar in llguidance's Lark dialect


class ConstraintFault(IntEnum):
    """Why a request with a constraint, or with other token rules, could not go on."""

    NONE = 0
    INVALID = 1  # it does not compile; front ends check before they submit, so this is rare
    TOO_LARGE = 2  # it compiles to more than the worker's limits allow, then or while it is followed
    TIMED_OUT = 3  # compiling took longer than the worker allows
    NO_TOKEN = 4  # the rules leave no token to choose from


class Constraint(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Structured output. The worker masks every token that cannot continue a valid output, and of end tokens all while the output is
    not complete. Once nothing but an end token can follow, one is chosen: the sequence ends with STOP, its last token an end token
    of the model (also with ignore_eos, which leaves it out of stop_token_ids).

    closing: if not empty, a reasoning section comes first: any text up to the first place where the output has this mark, then white
    space, then what the constraint says. No end token can be chosen inside. opening: the mark that such a section must begin with,
    and without which the constraint holds from the first token; empty: the output begins inside the section."""

    kind: ConstraintKind
    text: str = ""
    opening: str = ""
    closing: str = ""


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Effective sampling values of one request.

    A token is chosen from the model's logits in this order: repetition penalty, presence and frequency penalty, logit_bias; then ids
    become impossible (allowed_token_ids, bad words, stop ids before min_output_tokens, the constraint); then temperature, top_k,
    top_p, min_p and the draw. Greedy takes the largest after the impossible ones are out, the lowest id of equals.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: 64-bit; the random number of a token is a function of (seed, sequence index, position, vocabulary id) alone.
    repetition_penalty: of tokens in prompt or output, positive logits are divided by it, others multiplied (Keskar et al. 2019);
    1 is off. presence_penalty: subtracted once for a token that the *output* holds; frequency_penalty: subtracted as often as the
    output holds it. All three see every output token, history included.
    logit_bias_ids/logit_bias_values: added to the logits; ids are distinct, values finite.
    allowed_token_ids: if not empty, no other id can be chosen; ids are distinct. Stop ids must be listed to be chosen.
    bad_word_tokens/bad_word_lengths: token sequences that must not appear: the last token of one cannot be chosen where the tokens
    before it, prompt included, are its others. At most MAX_BAD_WORDS, each of 1 to MAX_BAD_WORD_TOKENS tokens.
    num_logprobs: log-probabilities of output tokens: -1 none, 0 the chosen token's, n also the n most probable ones'; at most
    MAX_LOGPROBS. They are log-softmax in float32 of the model's own logits, before everything above, and so may list ids
    that could not be chosen. num_prompt_logprobs: the same for the prompt's tokens from the second on, each given those before
    it; such a request neither reads nor writes the prefix cache.
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
    bad_word_tokens: bytes = b""  # u32 column: all words' tokens, end to end
    bad_word_lengths: bytes = b""  # u32 column: tokens of each word
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    constraint: Constraint | None = None


class StopRules(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token-level stop rules. Stop *texts* are matched by the front end and come back as `StopAt`.

    max_output_tokens counts from the end of the prompt. stop_token_ids holds every id that ends the sequence: the
    model's end tokens (unless ignore_eos) and the request's own; while the output holds fewer than min_output_tokens none of them
    can be chosen, except where a constraint leaves nothing else. The stop token is part of the output.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: bytes = b""  # u32 column
