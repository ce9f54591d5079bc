"""Contract 3, downwards: what the scheduler (ROUTER) sends to each worker rank (DEALER). The same bytes go to every rank.

A plan carries only what changed. The worker keeps, per row, its block table, lengths, last token and sampling state.

Which rows compute in a step, in full:
  1. `released` rows are emptied first (finished, aborted or preempted), then `copies` are made, then `admissions` fill rows.
  2. `grown` blocks are appended to their rows' block tables.
  3. Every row in `chunks` prefills tokens [start, start + length) of its known tokens.
  4. Every *decoding* row that is not in `paused` feeds its last token and samples the next, `num_steps` times. A row is decoding
     from the step after the chunk that reached the end of its known tokens until it is released. With `num_steps` k > 1 a row
     that meets a stop id or its token limit sits out the rest of the k.
  5. A decoding row in `forced` takes tokens that its constraint leaves no choice about: instead of its last token alone it feeds that
     token and the forced ones behind it, as one chunk, and samples the token after them.
A plan that holds a row under a constraint has num_steps 1. Such a row sits nothing out: a worker runs the forward pass of a plan ahead and
draws the constrained rows' tokens in it once it has those of the plan before.
A row samples when it decodes, or when its chunk reaches the end of its known tokens. Results list sampling rows in ascending
row number. Known tokens of a row are its prompt and the history it was admitted with.
"""

from msgspec import Struct

from pagecast_wire.intake import HelloWanted
from pagecast_wire.sampling import Constraint, SamplingParams

NULL_BLOCK = 0
"""Never allocated; the target of padding."""


class StartEpoch(Struct, frozen=True, forbid_unknown_fields=True, tag="start_epoch"):
    """Empty state. The first plan of the epoch is step 1. Sizes are the group's effective ones."""

    epoch: int
    num_blocks: int  # block ids are 1 .. num_blocks - 1
    block_size: int
    max_num_seqs: int  # rows are 0 .. max_num_seqs - 1
    max_model_len: int
    max_num_batched_tokens: int


class Admission(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sequence enters a row with all that the worker will ever need to know about it.

    tokens: u32 column, prompt then already emitted output. num_prompt_tokens splits the two. num_computed_tokens: KV of so many
    tokens is valid in `blocks` already (prefix hits). blocks: u32 column of block ids, in order. max_tokens: the sequence never
    holds more than this many tokens (prompt + output); the row stops decoding there. min_tokens: until the sequence holds so many,
    no id of stop_token_ids can be sampled.
    """

    row: int
    tokens: bytes
    num_prompt_tokens: int
    blocks: bytes
    num_computed_tokens: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: bytes
    sampling: SamplingParams
    sequence: int = 0


class StepPlan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="step_plan"):
    """One step. All columns are packed little-endian u32.

    grown_rows/grown_blocks: parallel columns, one new block per entry, appended in order.
    chunk_rows/chunk_starts/chunk_lengths: parallel columns. copy_from/copy_to: parallel columns of block ids.
    table_checksum: 0, or (debug) CRC-32 over every active row's (row, num_tokens, block table) that a worker compares after applying.
    forced_rows/forced_counts: parallel columns, rows ascending; forced_tokens: for each of them so many tokens, the newest that it holds
    and then those, at least one, that it takes.
    """

    epoch: int
    step: int
    num_steps: int = 1
    released: bytes = b""
    admissions: tuple[Admission, ...] = ()
    grown_rows: bytes = b""
    grown_blocks: bytes = b""
    chunk_rows: bytes = b""
    chunk_starts: bytes = b""
    chunk_lengths: bytes = b""
    paused: bytes = b""
    copy_from: bytes = b""
    copy_to: bytes = b""
    table_checksum: int = 0
    forced_rows: bytes = b""
    forced_counts: bytes = b""
    forced_tokens: bytes = b""


class PrepareConstraint(Struct, frozen=True, forbid_unknown_fields=True, tag="prepare_constraint"):
    """Compile this, beside the steps, and say so with ConstraintPrepared: rows with it will be admitted. Outside the order of plans."""

    constraint: Constraint


class StopWorker(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="stop_worker"):
    """Finish what was sent and exit 0; with a reason, this rank was refused: say so and exit 2."""

    reason: str = ""


class LogLevel(Struct, frozen=True, forbid_unknown_fields=True, tag="log_level"):
    """How much to log: "debug", "info", "warning", "error", or "" for what the rank was started with. Sent after a hello and on change."""

    level: str


class GroupFormed(Struct, frozen=True, forbid_unknown_fields=True, tag="group_formed"):
    """Every rank has joined: meet under this name at rank 0's address ("host:port"). Ends when any of its members does."""

    group: str
    address: str


ToWorker = StartEpoch | StepPlan | PrepareConstraint | StopWorker | HelloWanted | GroupFormed | LogLevel
