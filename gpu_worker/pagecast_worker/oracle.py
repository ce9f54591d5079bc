"""An executor without a model: it follows plans exactly and draws tokens from the cells it was pointed at.

Owns a paged memory of one u64 cell per token and the rows that plans fill and empty. Of sampling values only the seed, the numbers of
log-probabilities (oracle_logprobs) and whether there is a constraint (oracle_runs) have a meaning here. `oracle_tokens` says what any
request must produce, so a wrong block, length, order or epoch shows as a wrong token.
"""

import hashlib
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.checksum import table_checksum
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.intake import LoadProgress, ModelFacts
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.result import FLAG_IDLE, FLAG_STOP, StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import PlanError, Prepared, ReportProgress
from pagecast_worker.oracle_cells import Cells
from pagecast_worker.oracle_logprobs import OracleLogprobs
from pagecast_worker.oracle_model import avoid, draw, oracle_tokens, position_weights, row_key, token_terms
from pagecast_worker.oracle_runs import OracleRuns

__all__ = ["OracleExecutor", "oracle_tokens"]

DEFAULT_MODEL_LEN = 8192
DEFAULT_NUM_BLOCKS = 16_384
EOS_TOKEN_ID = 0

Rows = NDArray[np.int64]


class OracleExecutor:
    """Executor over `Cells`. Vectorised over rows; a decode step of 256 rows takes a fraction of a millisecond.

    Computes a step when it is submitted and holds its result back until oracle_step_us later, as an asynchronous device would.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.vocab_size = config.oracle_vocab_size
        self._results: deque[tuple[float, StepResult]] = deque()
        self._device_free_at = 0.0
        self.start: StartEpoch | None = None

    def load(self, report: ReportProgress) -> tuple[ModelFacts, int]:
        """Nothing to load: both phases are over at once."""
        for phase in ("weights", "warm-up"):
            report(LoadProgress(rank=self.config.rank, phase=phase, done=1, total=1))
        facts = ModelFacts(
            name="oracle",
            architecture="oracle",
            digest=hashlib.sha256(f"oracle 1 vocabulary {self.vocab_size}".encode()).hexdigest(),
            vocab_size=self.vocab_size,
            max_model_len=self.config.max_model_len or DEFAULT_MODEL_LEN,
            eos_token_ids=(EOS_TOKEN_ID,),
            dtype="uint64",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            kv_bytes_per_token=8,
            num_parameters=0,
        )
        return facts, self.config.num_blocks or DEFAULT_NUM_BLOCKS

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Empty: nothing is padded."""
        return ()

    def start_epoch(self, start: StartEpoch) -> None:
        """Empty rows and cells of the epoch's sizes."""
        rows, length = start.max_num_seqs, start.max_model_len
        self.start = start
        self._results.clear()
        self._logprobs = OracleLogprobs(self.vocab_size)
        self._runs = OracleRuns(self.vocab_size)
        self.cells = Cells(start.num_blocks, start.block_size, length)
        self._weights = position_weights(length)
        self.table = np.zeros((rows, self.cells.blocks_for(length)), dtype=np.int64)
        self.num_table_blocks = np.zeros(rows, dtype=np.int64)
        self._known = np.zeros((rows, length), dtype=np.uint32)  # untouched pages cost no memory
        self._num_known = np.zeros(rows, dtype=np.int64)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self._last_token = np.zeros(rows, dtype=np.int64)
        self.active = np.zeros(rows, dtype=bool)
        self._decoding = np.zeros(rows, dtype=bool)
        self._max_tokens = np.zeros(rows, dtype=np.int64)
        self._min_tokens = np.zeros(rows, dtype=np.int64)
        self._keys = np.zeros(rows, dtype=np.uint64)
        self._stops = np.full((rows, 1), -1, dtype=np.int64)

    def prepare(self, constraint: Constraint, done: Prepared) -> None:
        """Nothing to compile: the oracle says what it says."""
        done(constraint_digest(constraint), ConstraintFault.NONE)

    def submit(self, plan: StepPlan) -> None:
        """Apply and compute. Raises PlanError when the plan contradicts this rank's state."""
        self._apply(plan)
        if plan.table_checksum and plan.table_checksum != self.checksum():
            raise PlanError(f"step {plan.step}: block tables differ from the scheduler's")
        rows, tokens, flags = self._compute(plan)
        step_s = self.config.oracle_step_us * 1e-6
        self._device_free_at = max(self._device_free_at, time.monotonic()) + step_s
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            rank=self.config.rank,
            tokens=pack_u32(tokens),
            flags=flags.tobytes(),
            device_us=self.config.oracle_step_us,
            **self._logprobs.fields(plan, rows, tokens, flags, self._known), **self._runs.news(rows),
        )
        self._results.append((self._device_free_at, result))

    def collect(self, wait: bool) -> StepResult | None:
        if not self._results:
            return None
        remaining = self._results[0][0] - time.monotonic()
        if remaining > 0:
            if not wait:
                return None
            time.sleep(remaining)
        return self._results.popleft()[1]

    def close(self) -> None:
        self._results.clear()

    def _apply(self, plan: StepPlan) -> None:
        """Releases, copies, admissions, growth, in the order that the contract names."""
        self._release(self._rows(plan.released))
        self.cells.copy(self._blocks(plan.copy_from), self._blocks(plan.copy_to))
        for admission in plan.admissions:
            self._admit(admission)
        grown = self._rows(plan.grown_rows)
        for row, block in zip(grown.tolist(), self._blocks(plan.grown_blocks).tolist(), strict=True):
            self._append(row, np.array([block]))

    def checksum(self) -> int:
        """`table_checksum` of the rows as they are."""
        counts = self.num_table_blocks
        return table_checksum((r, int(self.num_tokens[r]), self.table[r, : counts[r]]) for r in np.flatnonzero(self.active).tolist())

    def _release(self, rows: Rows) -> None:
        if not self.active[rows].all():
            raise PlanError("a released row is empty")
        self.active[rows] = self._decoding[rows] = False
        self.table[rows] = 0
        self.num_table_blocks[rows] = 0

    def _admit(self, admission: Admission) -> None:
        row, tokens = admission.row, view_u32(admission.tokens)
        if row >= len(self.active) or self.active[row] or not 0 < len(tokens) <= self._known.shape[1]:
            raise PlanError(f"admission to row {row} of {len(tokens)} tokens does not fit")
        self.active[row] = True
        self._known[row, : len(tokens)] = tokens
        self._num_known[row] = self.num_tokens[row] = len(tokens)
        self._max_tokens[row], self._min_tokens[row] = admission.max_tokens, admission.min_tokens
        self._logprobs.admit(admission)
        self._runs.admit(admission)
        self._keys[row] = row_key(admission.sampling.seed, admission.sequence)
        stops = view_u32(admission.stop_token_ids)
        missing = len(stops) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops
        self._append(row, self._blocks(admission.blocks))

    def _append(self, row: int, blocks: Rows) -> None:
        first = int(self.num_table_blocks[row])
        if not self.active[row] or first + len(blocks) > self.table.shape[1]:
            raise PlanError(f"row {row} cannot take {len(blocks)} more blocks")
        self.table[row, first : first + len(blocks)] = blocks
        self.num_table_blocks[row] = first + len(blocks)

    def _compute(self, plan: StepPlan) -> tuple[Rows, NDArray[np.int64], NDArray[np.uint8]]:
        """The rows that sample, and tokens and flags, [num_steps, rows that sample], step-major."""
        chunk_rows, starts, lengths = self._rows(plan.chunk_rows), view_u32(plan.chunk_starts), view_u32(plan.chunk_lengths)
        decoding = self._decoding & (self.num_tokens < self._max_tokens)
        decoding[self._rows(plan.paused)] = False
        ends = starts.astype(np.int64) + lengths
        if (ends > self._num_known[chunk_rows]).any() or not self.active[chunk_rows].all():
            raise PlanError(f"step {plan.step}: a chunk reaches beyond its row's known tokens")
        self._prefill(chunk_rows, starts.astype(np.int64), lengths.astype(np.int64))
        finishing = chunk_rows[ends == self._num_known[chunk_rows]]
        jumping = self._jump(plan, decoding)
        rows = np.union1d(np.flatnonzero(decoding), finishing)
        alive = np.ones(len(rows), dtype=bool)
        tokens = np.zeros((plan.num_steps, len(rows)), dtype=np.int64)
        flags = np.full((plan.num_steps, len(rows)), FLAG_IDLE, dtype=np.uint8)
        for k in range(plan.num_steps):
            if k == 0:
                self._feed(np.setdiff1d(rows[decoding[rows]], jumping))
            else:
                self._feed(rows[alive])
            tokens[k, alive], flags[k, alive] = self._sample(rows[alive])
            alive &= (flags[k] & FLAG_STOP == 0) & (self.num_tokens[rows] < self._max_tokens[rows]) & decoding[rows]
        self._decoding[finishing] = True
        return rows, tokens, flags

    def _jump(self, plan: StepPlan, decoding: NDArray[np.bool_]) -> Rows:
        """Rows take their forced tokens and compute them behind their newest one. Returns those rows."""
        rows, counts = self._rows(plan.forced_rows), view_u32(plan.forced_counts).astype(np.int64)
        tokens = view_u32(plan.forced_tokens).astype(np.int64)
        starts = self.num_tokens[rows] - 1
        fits = len(rows) == len(counts) and counts.sum() == len(tokens) and (counts > 1).all() and decoding[rows].all()
        if not fits or (starts + counts >= self._max_tokens[rows]).any():
            raise PlanError(f"step {plan.step}: forced tokens for a row that cannot take them")
        end = 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            end += count
            taken = tokens[end - count : end]
            if taken[0] != self._last_token[row]:
                raise PlanError(f"step {plan.step}: row {row} takes forced tokens behind one that is not its newest")
            self._runs.take(row, taken[1:].tolist())
            self._known[row, start : start + count] = taken
            self.num_tokens[row] = start + count
        self._prefill(rows, starts, counts)
        return rows

    def _prefill(self, rows: Rows, starts: Rows, lengths: Rows) -> None:
        """Write the cells of every chunk. A chunk may continue from blocks that another chunk of this step fills: that one
        starts earlier, so chunks go in the order of their starts, equal ones together."""
        for start in np.unique(starts):
            chosen = np.flatnonzero(starts == start)
            if start:
                base = self.cells.read(self._slots(rows[chosen], starts[chosen] - 1))
            else:
                base = np.zeros(len(chosen), dtype=np.uint64)
            index = np.repeat(np.arange(len(chosen)), lengths[chosen])
            first = np.cumsum(lengths[chosen]) - lengths[chosen]  # where each chunk begins in the flat arrays
            positions = start + np.arange(len(index)) - first[index]
            flat_rows = rows[chosen][index]
            sums = np.cumsum(token_terms(self._known[flat_rows, positions], self._weights[positions]), dtype=np.uint64)
            before = np.concatenate([np.zeros(1, dtype=np.uint64), sums])[first]
            self.cells.write(self._slots(flat_rows, positions), sums - before[index] + base[index])

    def _feed(self, rows: Rows) -> None:
        """Write the cell of each row's last token."""
        if not len(rows):
            return
        positions = self.num_tokens[rows] - 1
        terms = token_terms(self._last_token[rows], self._weights[positions])
        self.cells.write(self._slots(rows, positions), self.cells.read(self._slots(rows, positions - 1)) + terms)

    def _sample(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """One token per row from all its cells."""
        held = self.num_tokens[rows]
        tokens = draw(self.cells.contexts(self.table[rows], held), self._keys[rows], self.vocab_size)
        self._runs.force(rows, tokens)
        stops = self._stops[rows]
        hits = (stops == tokens[:, None]).any(axis=1)
        early = hits & (held < self._min_tokens[rows])
        for index in np.flatnonzero(early).tolist():
            tokens[index] = avoid(int(tokens[index]), set(stops[index].tolist()), self.vocab_size)
            hits[index] = bool((stops[index] == tokens[index]).any())
        self._runs.follow(rows, tokens)
        self._last_token[rows] = tokens
        self.num_tokens[rows] = held + 1
        return tokens, np.where(hits, FLAG_STOP, 0).astype(np.uint8)

    def _slots(self, rows: Rows, positions: Rows) -> Rows:
        """block * block_size + offset of each (row, position). Raises PlanError where the row has no block for it."""
        size = self.cells.block_size
        if (positions >= self.num_table_blocks[rows] * size).any():
            raise PlanError("a row has no block for a token that it computes")
        return self.table[rows, positions // size] * size + positions % size

    def _rows(self, column: bytes) -> Rows:
        rows = view_u32(column).astype(np.int64)
        if (rows >= len(self.active)).any():
            raise PlanError("a row number is not below max_num_seqs")
        return rows

    def _blocks(self, column: bytes) -> Any:
        blocks = view_u32(column).astype(np.int64)
        if ((blocks < 1) | (blocks >= self.cells.num_blocks)).any():
            raise PlanError("a block id is not one of the pool's")
        return blocks
