"""Collects one step's decisions and turns them into an immutable StepPlan."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.request import Sequence
from pagecast_scheduler.core.rows import EMPTY, Index
from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import Admission, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Jump:
    """A decoding row that takes forced tokens (u32) in a step. newest: the token before them, which the step feeds first."""

    row: int
    generation: int
    newest: int
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class PlanDraft:
    """What the plan being made holds so far. stepping: rows that decode, ascending, jumps included. stalled: decoding rows without a block
    for it."""

    num_steps: int = 1
    stepping: Index = field(default_factory=lambda: EMPTY)
    stalled: list[int] = field(default_factory=list)
    grown_rows: list[Index] = field(default_factory=list)
    grown_blocks: list[Index] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)  # (row, start, length)
    num_prefill_tokens: int = 0
    jumps: list[Jump] = field(default_factory=list)
    finishing: list[int] = field(default_factory=list)  # rows whose chunk reaches the end of their known tokens
    telling: list[int] = field(default_factory=list)  # rows whose chunk tells log-probabilities of the prompt
    admissions: list[Admission] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)  # rows that already have a part in this plan beyond decoding: never victims

    def grow(self, rows: Index, blocks: Index) -> None:
        self.grown_rows.append(rows)
        self.grown_blocks.append(blocks)

    @property
    def is_empty(self) -> bool:
        return not len(self.stepping) and not self.chunks

    def drop_row(self, row: int) -> None:
        """The row was preempted after it had been given blocks here."""
        for at, rows in enumerate(self.grown_rows):
            keep = rows != row
            if not keep.all():
                self.grown_rows[at], self.grown_blocks[at] = rows[keep], self.grown_blocks[at][keep]

    def build(self, epoch: int, step: int, released: list[int], paused: Index, checksum: int) -> StepPlan:
        chunk_rows = chunk_starts = chunk_lengths = sitting_out = b""
        if self.chunks:
            chunk_rows, chunk_starts, chunk_lengths = (pack_u32(column) for column in zip(*self.chunks, strict=True))
        if len(paused) or self.stalled:
            sitting_out = pack_u32(np.union1d(paused, np.array(self.stalled, np.int64)))
        forced_rows = forced_counts = forced_tokens = b""
        if self.jumps:
            forced_rows = pack_u32([jump.row for jump in self.jumps])
            forced_counts = pack_u32([1 + len(jump.tokens) for jump in self.jumps])
            forced_tokens = b"".join(pack_u32([jump.newest]) + pack_u32(jump.tokens) for jump in self.jumps)
        return StepPlan(
            epoch, step, self.num_steps, pack_u32(released) if released else b"", tuple(self.admissions), _pack_parts(self.grown_rows),
            _pack_parts(self.grown_blocks), chunk_rows, chunk_starts, chunk_lengths, sitting_out, forced_rows=forced_rows,
            forced_counts=forced_counts, forced_tokens=forced_tokens, table_checksum=checksum,
        )  # fmt: skip


def _pack_parts(parts: list[Index]) -> bytes:
    if not parts:
        return b""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype("<u4").tobytes()


def admission(seq: Sequence, blocks: Index, num_computed: int) -> Admission:
    """The wire form of a sequence entering its row."""
    request = seq.request
    return Admission(
        row=seq.row, tokens=seq.tokens[: seq.num_tokens].astype("<u4", copy=False).tobytes(),
        num_prompt_tokens=request.num_prompt_tokens, blocks=blocks.astype("<u4").tobytes(),
        num_computed_tokens=num_computed, max_tokens=request.max_tokens, min_tokens=request.min_tokens,
        stop_token_ids=request.submit.stop.stop_token_ids, sampling=request.sampling, sequence=seq.index,
    )  # fmt: skip
