"""The CPU's side of the rows: it applies plans to NumPy mirrors and says, per step, which rows compute what.

Everything about a step but the values of sampled tokens is known here without asking the device: plans are deterministic, so a
row's length is its known tokens plus the steps planned for it.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.checksum import table_checksum
from pagecast_wire.codec import view_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_worker.executor import PlanError

Int = NDArray[np.int64]
NONE: Int = np.zeros(0, dtype=np.int64)
NONE.flags.writeable = False


@dataclass(slots=True)
class Changes:
    """What a plan changes on the device. table_*: parallel entries (row * blocks per row + column, block id).

    fresh_blocks: blocks that hold nothing yet. copy_from, copy_to: whole-block copies, made before anything is computed.
    """

    admissions: tuple[Admission, ...]
    table_index: Int
    table_blocks: Int
    fresh_blocks: Int
    copy_from: Int
    copy_to: Int


@dataclass(slots=True)
class Forced:
    """Rows, ascending, that take tokens without drawing them. counts: how many; tokens: theirs, end to end; held: tokens of each row once
    it has them."""

    rows: Int
    counts: Int
    tokens: Int
    held: Int


@dataclass(slots=True)
class Schedule:
    """What a plan computes. decode_rows ascend; token t of the step is decode row t, then come the chunks end to end.

    sample_rows ascend; sample_index[i] is the token of the step whose logits row sample_rows[i] draws from. later[j] holds the
    rows that still decode in step j + 1 of a k-step plan. early: the sampling rows that min_tokens binds, per step of the plan.
    forced: who takes forced tokens; such a row is among the chunks and not among those that decode.
    """

    decode_rows: Int
    decode_positions: Int
    chunk_rows: Int
    chunk_starts: Int
    chunk_lengths: Int
    sample_rows: Int
    sample_index: Int
    later: list[Int]
    early: list[Int]
    forced: Forced | None = None

    @property
    def decode_only(self) -> bool:
        return not len(self.chunk_rows)

    def chunk_tokens(self) -> tuple[Int, Int, Int]:
        """Rows and positions of the chunks' tokens, end to end, and starts[chunks + 1], where each begins and the last ends."""
        starts = np.concatenate(([0], np.cumsum(self.chunk_lengths)))
        chunk = np.repeat(np.arange(len(self.chunk_lengths)), self.chunk_lengths)
        return self.chunk_rows[chunk], self.chunk_starts[chunk] + np.arange(len(chunk)) - starts[chunk], starts


def _joined(parts: list[Int]) -> Int:
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else NONE


_VERSIONS = itertools.count()


class RowBook:
    """Mirrors of every row of one epoch. Raises PlanError for a plan that contradicts them."""

    def __init__(self, start: StartEpoch, max_blocks: int) -> None:
        rows = start.max_num_seqs
        self.start = start
        self.version = next(_VERSIONS)
        """Another one after each admission, and in each book: while it stays, a row's leading blocks do."""
        self.max_blocks = max_blocks
        self.table = np.zeros((rows, max_blocks), dtype=np.int64)
        self.num_blocks = np.zeros(rows, dtype=np.int64)
        self.known = np.zeros((rows, start.max_model_len), dtype=np.uint32)  # untouched pages cost no memory
        self.num_known = np.zeros(rows, dtype=np.int64)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.max_tokens = np.zeros(rows, dtype=np.int64)
        self.min_tokens = np.zeros(rows, dtype=np.int64)
        self.active = np.zeros(rows, dtype=bool)
        self.decoding = np.zeros(rows, dtype=bool)

    def apply(self, plan: StepPlan) -> Changes:
        """Releases, copies, admissions, growth, in the contract's order; then the checksum."""
        if plan.released:
            released = self._rows(plan.released)
            if not self.active[released].all():
                raise PlanError(f"step {plan.step}: a released row is empty")
            self.active[released] = self.decoding[released] = False
            self.num_blocks[released] = 0
        copy_from, copy_to = self._blocks(plan.copy_from), self._blocks(plan.copy_to)
        index: list[Int] = []
        blocks: list[Int] = []
        fresh: list[Int] = []
        for admission in plan.admissions:
            given = self._admit(admission)
            index.append(admission.row * self.max_blocks + np.arange(len(given)))
            blocks.append(given)
            fresh.append(given[-(-admission.num_computed_tokens // self.start.block_size) :])
        grown_rows, grown = self._rows(plan.grown_rows), self._blocks(plan.grown_blocks)
        if len(grown_rows) != len(grown):
            raise PlanError(f"step {plan.step}: grown_rows and grown_blocks differ in length")
        if len(grown):
            index.append(self._grow(grown_rows, grown))
            blocks.append(grown)
            fresh.append(grown)
        if plan.table_checksum and plan.table_checksum != self.checksum():
            raise PlanError(f"step {plan.step}: block tables differ from the scheduler's")
        emptied = _joined(fresh)
        if len(copy_to):
            emptied = emptied[~np.isin(emptied, copy_to)]
        return Changes(plan.admissions, _joined(index), _joined(blocks), emptied, copy_from, copy_to)

    def schedule(self, plan: StepPlan) -> Schedule:
        """Which rows compute and sample in the plan's steps; moves the mirrors past them."""
        decoding = self.decoding & (self.num_tokens < self.max_tokens)
        if plan.paused:
            decoding[self._rows(plan.paused)] = False
        decode_rows = np.flatnonzero(decoding)
        positions = self.num_tokens[decode_rows] - 1
        self._check_room(plan.step, decode_rows, positions)
        if plan.chunk_rows or plan.chunk_starts or plan.chunk_lengths or plan.forced_rows:
            return self._schedule_mixed(plan, decode_rows, positions)
        later, early = self._take_steps(plan, decode_rows, decode_rows)
        return Schedule(decode_rows, positions, NONE, NONE, NONE, decode_rows, np.arange(len(decode_rows)), later, early)

    def _schedule_mixed(self, plan: StepPlan, decode_rows: Int, positions: Int) -> Schedule:
        """A plan with prefill chunks beside the rows that decode."""
        chunk_rows = self._rows(plan.chunk_rows)
        starts, lengths = view_u32(plan.chunk_starts).astype(np.int64), view_u32(plan.chunk_lengths).astype(np.int64)
        self._check_chunks(plan.step, chunk_rows, starts, lengths)
        finishes = starts + lengths == self.num_known[chunk_rows]
        forced = None
        if plan.forced_rows:
            forced = self._force(plan, decode_rows)
            draws = ~np.isin(decode_rows, forced.rows)
            decode_rows, positions = decode_rows[draws], positions[draws]
            chunk_rows = np.concatenate((forced.rows, chunk_rows))
            starts = np.concatenate((forced.held - forced.counts - 1, starts))
            lengths = np.concatenate((forced.counts + 1, lengths))
            finishes = np.concatenate((np.ones(len(forced.rows), np.bool_), finishes))
        last_tokens = len(decode_rows) + np.cumsum(lengths) - 1
        sample_rows = np.concatenate((decode_rows, chunk_rows[finishes]))
        order = np.argsort(sample_rows, kind="stable")
        sample_index = np.concatenate((np.arange(len(decode_rows)), last_tokens[finishes]))[order]
        sample_rows = sample_rows[order]
        later, early = self._take_steps(plan, sample_rows, decode_rows)
        self.decoding[chunk_rows[finishes]] = True
        return Schedule(decode_rows, positions, chunk_rows, starts, lengths, sample_rows, sample_index, later, early, forced)

    def _force(self, plan: StepPlan, decode_rows: Int) -> Forced:
        """Decoding rows take the plan's forced tokens: from here on their newest tokens are known here too."""
        rows, counts = self._rows(plan.forced_rows), view_u32(plan.forced_counts).astype(np.int64)
        tokens = view_u32(plan.forced_tokens)
        if len(rows) != len(counts) or int(counts.sum()) != len(tokens) or plan.num_steps != 1:
            raise PlanError(f"step {plan.step}: forced columns differ in length, or the plan has several steps")
        held = self.num_tokens[rows] + counts - 1
        fits = (counts > 1).all() and (rows[1:] > rows[:-1]).all() and (held < self.max_tokens[rows]).all()
        if not fits or not np.isin(rows, decode_rows).all():
            raise PlanError(f"step {plan.step}: forced tokens for a row that cannot take them")
        self._check_room(plan.step, rows, held - 1)
        first = np.cumsum(counts) - counts
        within = np.arange(len(tokens)) - np.repeat(first, counts)
        self.known[np.repeat(rows, counts), np.repeat(held - counts, counts) + within] = tokens
        self.num_known[rows] = self.num_tokens[rows] = held
        return Forced(rows, counts - 1, tokens[within > 0].astype(np.int64), held)

    def _take_steps(self, plan: StepPlan, sample_rows: Int, decode_rows: Int) -> tuple[list[Int], list[Int]]:
        """Moves the mirrors past all steps of a plan. Returns `later` and `early` of the Schedule."""
        early = [self._take(sample_rows)]
        later: list[Int] = []
        for _ in range(plan.num_steps - 1):
            alive = decode_rows[self.num_tokens[decode_rows] < self.max_tokens[decode_rows]]
            self._check_room(plan.step, alive, self.num_tokens[alive] - 1)
            later.append(alive)
            early.append(self._take(alive))
        return later, early

    def slots(self, rows: Int, positions: Int) -> Int:
        """block * block_size + offset of each (row, position)."""
        size = self.start.block_size
        return self.table[rows, positions // size] * size + positions % size

    def checksum(self) -> int:
        """`table_checksum` of the rows as they are."""
        counts = self.num_blocks
        return table_checksum((r, int(self.num_tokens[r]), self.table[r, : counts[r]]) for r in np.flatnonzero(self.active).tolist())

    def _take(self, rows: Int) -> Int:
        """Each row samples one token more. Returns those that min_tokens binds."""
        tokens = self.num_tokens[rows]
        bound = tokens < self.min_tokens[rows]
        self.num_tokens[rows] = tokens + 1
        return rows[bound] if bound.any() else NONE

    def _admit(self, admission: Admission) -> Int:
        row, tokens, blocks = admission.row, view_u32(admission.tokens), self._blocks(admission.blocks)
        if row >= len(self.active) or self.active[row] or not 0 < len(tokens) <= self.known.shape[1] or len(blocks) > self.max_blocks:
            raise PlanError(f"admission to row {row} of {len(tokens)} tokens in {len(blocks)} blocks does not fit")
        self.active[row] = True
        self.version = next(_VERSIONS)
        self.known[row, : len(tokens)] = tokens
        self.num_known[row] = self.num_tokens[row] = len(tokens)
        self.max_tokens[row], self.min_tokens[row] = admission.max_tokens, admission.min_tokens
        self.table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        return blocks

    def _grow(self, rows: Int, blocks: Int) -> Int:
        """Append one block per entry; returns the flat table indices. A row may appear more than once."""
        column = self.num_blocks[rows]
        if len(rows) > 1 and not (rows[1:] > rows[:-1]).all():
            order = np.argsort(rows, kind="stable")
            ordered = rows[order]
            column[order] += np.arange(len(rows)) - np.searchsorted(ordered, ordered)  # how often the row came before
        if not self.active[rows].all() or (column >= self.max_blocks).any():
            raise PlanError("a row that grows is empty or full")
        self.table[rows, column] = blocks
        np.add.at(self.num_blocks, rows, 1)
        return rows * self.max_blocks + column

    def _check_chunks(self, step: int, rows: Int, starts: Int, lengths: Int) -> None:
        if not len(rows) == len(starts) == len(lengths):
            raise PlanError(f"step {step}: chunk columns differ in length")
        ends = starts + lengths
        if not self.active[rows].all() or (ends > self.num_known[rows]).any() or (lengths < 1).any():
            raise PlanError(f"step {step}: a chunk reaches beyond its row's known tokens")
        self._check_room(step, rows, ends - 1)

    def _check_room(self, step: int, rows: Int, positions: Int) -> None:
        if (positions >= self.num_blocks[rows] * self.start.block_size).any():
            raise PlanError(f"step {step}: a row has no block for a token that it computes")

    def _rows(self, column: bytes) -> Int:
        if not column:
            return NONE
        rows = view_u32(column).astype(np.int64)
        if (rows >= len(self.active)).any():
            raise PlanError("a row number is not below max_num_seqs")
        return rows

    def _blocks(self, column: bytes) -> Int:
        if not column:
            return NONE
        blocks = view_u32(column).astype(np.int64)
        if ((blocks < 1) | (blocks >= self.start.num_blocks)).any():
            raise PlanError("a block id is not one of the pool's")
        return blocks
