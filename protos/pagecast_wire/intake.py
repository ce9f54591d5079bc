"""Contract 2: messages between a front end (DEALER) and the scheduler (ROUTER).

A front end dials in with `FrontendHello` and gets `FrontendWelcome` with a `slot`. It names its requests by integer keys
`slot << KEY_BITS | counter`, so a key is unique in the cluster and the scheduler needs no table to route an answer.
After every step that concerns it a front end gets exactly one `FrontendBatch`. A front end may send several messages as the parts of one
ZeroMQ message; they count as if they had come one after the other.
"""

from enum import IntEnum

from msgspec import Struct

from pagecast_wire.sampling import FinishReason, SamplingParams, StopRules

KEY_BITS = 40
"""Low bits of a key that the front end counts up; the bits above are its slot."""


class Priority(IntEnum):
    """Lower is more urgent."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


class Phase(IntEnum):
    """What a client sees of a request; derived by the scheduler, never stored."""

    QUEUED = 1
    PREFILLING = 2
    DECODING = 3
    PAUSED_SLOW_CONSUMER = 4
    RECOVERING = 5


class ServingState(IntEnum):
    """State of the engine behind a front end; drives health."""

    STARTING = 1
    SERVING = 2
    RECOVERING = 3
    STALLED = 4
    DRAINING = 5


class RejectReason(IntEnum):
    """Why a submit was refused; each maps to one row of the status table in the front end."""

    OVERLOADED = 1  # queue full, in requests or tokens
    STARTING = 2
    DRAINING = 3
    RECOVERING = 4
    PROMPT_TOO_LONG = 5  # field prompt: longer than max_model_len - 1
    TOO_MANY_TOKENS = 6  # field max_output_tokens: prompt + max_output_tokens can never fit the block pool or max_model_len
    DEADLINE_UNREACHABLE = 7
    QUEUE_TIME_EXCEEDED = 8  # the estimate already exceeds max_queue_time
    DUPLICATE_KEY = 9
    INVALID = 10  # anything else wrong with the message; field names it
    REQUEST_ID_IN_USE = 11  # a live request of the owner has the id
    REQUEST_UNKNOWN = 12  # nothing to attach to: never was, or no longer kept


class ModelFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker knows about its loaded model; reported in its hello, passed on to front ends."""

    name: str
    architecture: str
    digest: str  # hex SHA-256 over the weights' identity
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    num_parameters: int
    quantization: str = ""


class EngineLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Effective limits of the running engine."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    enable_prefix_caching: bool
    retention_ms: int = 0  # how long a finished request can still be attached to
    front_end_grace_ms: int = 0  # how long requests of a dead front end go on for somebody to attach


class FrontendHello(Struct, frozen=True, forbid_unknown_fields=True, tag="frontend_hello"):
    """First message of a front end. `slot` is -1, or the slot it had before the scheduler was lost."""

    wire_version: int
    wire_digest: str
    incarnation: str
    pid: int
    pid_namespace: int  # see host.pid_namespace; a pidfd is used only where both ends agree on it
    slot: int = -1


class FrontendWelcome(Struct, frozen=True, forbid_unknown_fields=True, tag="frontend_welcome"):
    """Answer to the hello, sent as soon as the model's facts are known (before SERVING is possible)."""

    slot: int
    scheduler_incarnation: str
    model: ModelFacts
    limits: EngineLimits


class FrontendRefused(Struct, frozen=True, forbid_unknown_fields=True, tag="frontend_refused"):
    """The hello cannot be served: wrong wire version or digest. Names both sides' values."""

    reason: str


class Identity(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What makes a request findable through every front end, under (owner, request_id); no request_id: it is not.

    digest: SHA-256 of what the caller asked for, so that the same request can join and another is refused. spec: what a front end
    needs to make the caller's view again; opaque to the scheduler. join: attach to a live or kept request with the same id and
    digest instead of being refused. keep: attachable after its front end is gone, and for a while after its end.
    """

    owner: str = ""  # the principal
    request_id: str = ""
    digest: bytes = b""
    spec: bytes = b""
    join: bool = False
    keep: bool = False
    labels: tuple[tuple[str, str], ...] = ()  # the caller's notes, for operators


class Submit(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="submit"):
    """One request. Also used to bring a request back, with its history, after a scheduler was lost.

    prompt: u32 column of token ids, at least one. history: per sequence a u32 column of output ids already delivered
    (empty for a new request); generation continues after them. cache_namespace: 32 bytes that the server derived; requests
    share prefix-cache blocks only within one namespace. bypass_prefix_cache is implied by prompt
    log-probabilities. Times are relative milliseconds, converted once on arrival.
    """

    key: int
    prompt: bytes
    sampling: SamplingParams
    stop: StopRules
    cache_namespace: bytes
    tenant: str = ""
    num_sequences: int = 1
    history: tuple[bytes, ...] = ()
    priority: int = Priority.NORMAL
    deadline_ms: int = -1  # time left until the caller's deadline; -1: none
    time_budget_ms: int = -1  # end gracefully with TIME_LIMIT; -1: none
    max_queue_ms: int = -1  # refuse or end with QUEUE_TIME_EXCEEDED; -1: none
    bypass_prefix_cache: bool = False
    identity: Identity = Identity()


class Abort(Struct, frozen=True, forbid_unknown_fields=True, tag="abort"):
    """The readers of these keys are gone for good: whole requests end with CANCELLED, unless others read them too. Unknown or
    finished keys are ignored."""

    keys: tuple[int, ...]


class StopAt(Struct, frozen=True, forbid_unknown_fields=True, tag="stop_at"):
    """A stop text was found: the sequence ends with STOP and keeps its first `keep` output tokens (usage counts those)."""

    key: int
    sequence: int
    keep: int


class Pause(Struct, frozen=True, forbid_unknown_fields=True, tag="pause"):
    """Flow control: while `paused`, the sequences of this request sit out steps and keep their blocks."""

    key: int
    paused: bool


class Ready(Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """A resubmitting front end has sent all it had; new admissions may start."""


class FrontendPing(Struct, frozen=True, forbid_unknown_fields=True, tag="frontend_ping"):
    """Every second, so that a front end that vanished without a pidfd is noticed and its requests are cancelled."""

    slot: int


class Farewell(Struct, frozen=True, forbid_unknown_fields=True, tag="farewell"):
    """The last message of a front end that ends on purpose. What it leaves open is dealt with as after its loss."""


class HelloWanted(Struct, frozen=True, forbid_unknown_fields=True, tag="hello_wanted"):
    """The scheduler does not know the sender (it was restarted): say hello again. Sent to front ends and workers."""

    scheduler_incarnation: str


class Accepted(Struct, frozen=True, forbid_unknown_fields=True):
    """A request is in the queue. queue_position: sequences that waited there when it came."""

    key: int
    queue_position: int


class Rejected(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A refusal before acceptance. limit and actual explain PROMPT_TOO_LONG and TOO_MANY_TOKENS."""

    key: int
    reason: RejectReason
    field: str = ""
    limit: int = 0
    actual: int = 0
    retry_after_ms: int = 0


class Usage(Struct, frozen=True, forbid_unknown_fields=True):
    """Token counts of one sequence, and microseconds from its request's arrival: to its first place in the batch, its first token, its end.

    cached_tokens: of the prompt, found in the prefix cache at the first admission. recomputed_tokens: computed again after preemption
    or recovery.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    queue_us: int
    first_token_us: int
    total_us: int
    num_preemptions: int
    num_recoveries: int


class Finished(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """End of one sequence; follows (in the same batch or later) the batch that carries its last token.

    stop_token_id: the id that ended it for STOP by token; it is the last of the sequence's tokens. -1 otherwise.
    constraint_fault: a ConstraintFault, for CONSTRAINT_FAILED.
    """

    key: int
    sequence: int
    reason: FinishReason
    usage: Usage
    stop_token_id: int = -1
    constraint_fault: int = 0


class Progress(Struct, frozen=True, forbid_unknown_fields=True):
    """Phase change or progress of one request that has emitted nothing lately.

    queue_position: sequences before it, while it waits. prefill_done of prefill_total known tokens are computed, or were cached.
    """

    key: int
    phase: Phase
    queue_position: int
    prefill_done: int
    prefill_total: int
    cached_tokens: int


class TokenLogprobs(Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities of one output token: its own, and the best ones as columns (u32 ids, f32 values), best first.

    Comes in the same batch as the token, for every token of a sequence that asked; offset is the token's output offset.
    """

    key: int
    sequence: int
    offset: int
    logprob: float
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities of consecutive prompt tokens, each given all before it. Only the first sequence computes them.

    start: position of the first token here, 1 at least (the prompt's first token has none). logprobs: f32 column, one per token.
    top_ids/top_logprobs: u32 and f32 columns, num_top for each token, best first. Parts of a prompt come in order, without gap or
    repeat, none later than the batch of the first output token. A request submitted again after a scheduler was lost begins anew:
    a receiver ignores positions that it has.
    """

    key: int
    start: int
    num_top: int
    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class FrontendBatch(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="batch"):
    """All that one front end learns from one step.

    Token columns, one entry per sequence that gained tokens: keys u64, sequences u32, offsets u32 (output offset of the first
    token here), counts u32; tokens u32 holds the sum of counts, in the same order.
    """

    step: int
    keys: bytes = b""
    sequences: bytes = b""
    offsets: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    accepted: tuple[Accepted, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    finished: tuple[Finished, ...] = ()
    progress: tuple[Progress, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class LoadProgress(Struct, frozen=True, forbid_unknown_fields=True, tag="load_progress"):
    """How far a rank's start-up is; a worker sends it up, the scheduler passes it on."""

    rank: int
    phase: str  # "device", "weights", "kernels", "memory", "steps", "warm-up"; the last one ends with done = total
    done: int
    total: int


class EngineStatus(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="engine_status"):
    """Sent to every front end on change and at least every second: health and load come from here alone."""

    state: ServingState
    epoch: int
    step: int
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_referenced: int = 0
    num_blocks_cached: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    num_preemptions: int = 0
    num_recoveries: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    device_us: int = 0  # that steps took on the device of the rank that answers
    forced_tokens: int = 0  # of output_tokens, those that a constraint left no choice about and no step had to draw
    load: tuple[LoadProgress, ...] = ()
    log_level: str = ""  # what an operator wants of every process; "": as configured
