"""Contract 3, upwards: what a worker rank sends to the scheduler. Only rank 0 sends token columns."""

from msgspec import Struct

from pagecast_wire.intake import LoadProgress, ModelFacts

FLAG_STOP = 1
"""The sampled token is one of the row's stop token ids (and min_tokens was reached): the sequence ends here."""
FLAG_BAD = 2
"""The row's logits held NaN or infinity; its token is meaningless."""
FLAG_IDLE = 4
"""k-step plans only: the row had ended before this one of the k; its token is meaningless."""
FLAG_DEAD = 8
"""The row's constraint or token rules leave no token; its token is meaningless, and the sequence ends here."""
FLAG_LARGE = 16
"""Beside FLAG_DEAD: the constraint has grown beyond the worker's limits."""


class GroupJoin(Struct, frozen=True, forbid_unknown_fields=True, tag="group_join"):
    """First message of a rank whose executor computes together with others; repeated each second until GroupFormed.

    Says what ranks must agree on before any of them loads. address: "host:port" where rank 0 waits for the others; of others "".
    """

    wire_version: int
    wire_digest: str
    incarnation: str
    pid: int
    pid_namespace: int
    rank: int
    world_size: int
    model_digest: str
    config_digest: str
    address: str


class WorkerHello(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="worker_hello"):
    """A rank dials in when its weights are loaded and its pool is sized. One incarnation per process life.

    group: name of the GroupFormed that this process belongs to; "" where ranks compute by themselves. step_sizes: ascending numbers of
    tokens that a step with chunks computes at the least cost for each; what does not fill one of them is padded.
    """

    wire_version: int
    wire_digest: str
    incarnation: str
    pid: int
    pid_namespace: int
    rank: int
    world_size: int
    last_epoch: int  # highest epoch this process has seen; a restarted scheduler goes on above it
    model: ModelFacts
    config_digest: str
    num_blocks: int
    block_size: int
    group: str = ""
    step_sizes: tuple[int, ...] = ()


class StepResult(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="step_result"):
    """What one plan produced.

    tokens: u32 column of num_steps * n entries for the n rows that sampled, in ascending row number, step-major
    (all rows of the first of the k steps, then of the second ...). flags: u8 column, same shape.
    logprob_rows: u32 column of indices into `tokens`, for rows that asked; logprobs f32, same length; top_counts u32, same length;
    top_ids/top_logprobs: each asked row's num_logprobs best entries, concatenated in the same order.
    prompt_rows/prompt_starts/prompt_counts/prompt_tops: u32 columns, one entry per chunk of a row that asked for prompt
    log-probabilities: the row, the position of the first token told of, how many there are, and how many best entries each has. A
    chunk over [start, end) tells of tokens start + 1 to end, as far as they are of the prompt. prompt_logprobs f32,
    prompt_top_ids u32 and prompt_top_logprobs f32 hold all entries' values end to end.
    forced_at/forced_counts: parallel u32 columns; forced_tokens: u32, all runs end to end. Behind the token at index forced_at of `tokens`
    the row's constraint leaves no choice about so many tokens. No stop id is among them; a row that asks for log-probabilities, or that
    has rules which may forbid a token, has none. What is told once is not told again.
    """

    epoch: int
    step: int
    rank: int
    tokens: bytes = b""
    flags: bytes = b""
    logprob_rows: bytes = b""
    logprobs: bytes = b""
    top_counts: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    prompt_rows: bytes = b""
    prompt_starts: bytes = b""
    prompt_counts: bytes = b""
    prompt_tops: bytes = b""
    prompt_logprobs: bytes = b""
    prompt_top_ids: bytes = b""
    prompt_top_logprobs: bytes = b""
    forced_at: bytes = b""
    forced_counts: bytes = b""
    forced_tokens: bytes = b""
    device_us: int = 0


class ConstraintPrepared(Struct, frozen=True, forbid_unknown_fields=True, tag="constraint_prepared"):
    """A rank's answer to PrepareConstraint. digest: pagecast_wire.constraints.constraint_digest. fault: a ConstraintFault, NONE if rows may
    come."""

    rank: int
    digest: bytes
    fault: int = 0


class PlanGap(Struct, frozen=True, forbid_unknown_fields=True, tag="plan_gap"):
    """A plan arrived whose step is not last_step + 1 (and is not a duplicate): send again from last_step + 1."""

    epoch: int
    rank: int
    last_step: int


class Heartbeat(Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """From a thread of its own, every second: the last step completed."""

    rank: int
    incarnation: str
    epoch: int
    last_step: int


class WorkerFault(Struct, frozen=True, forbid_unknown_fields=True, tag="worker_fault"):
    """A step or the start failed. kind is a closed word; detail goes to the operator's log only."""

    rank: int
    epoch: int
    step: int
    kind: str  # "load", "out_of_memory", "step", "protocol"
    detail: str


FromWorker = GroupJoin | WorkerHello | StepResult | ConstraintPrepared | PlanGap | Heartbeat | WorkerFault | LoadProgress
