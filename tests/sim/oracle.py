"""A worker without a model but with real paged memory, which checks the contract of `pagecast_wire.plan` while it executes.

Every block is a list of cells, one per token, holding the chain value of `reference`. Rows write through the block table they were
given and, before they sample, read all of their cells back through it: a block handed out twice, a missing copy, a stale hit or a
short table shows at once, either as a Violation here or as other tokens later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sim.reference import EMPTY, VOCABULARY, extend, forced_run, sample

from pagecast_wire.checksum import table_checksum
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.plan import NULL_BLOCK, Admission, StartEpoch, StepPlan
from pagecast_wire.result import FLAG_BAD, FLAG_DEAD, FLAG_IDLE, FLAG_STOP, StepResult
from pagecast_worker.oracle_logprobs import OracleLogprobs

BROKEN = 0
"""Cell written by a row whose numbers were NaN; whoever reads it is NaN as well."""
UNWRITTEN = 1


class Violation(AssertionError):
    """The scheduler broke a rule of the plan contract, or an invariant."""


class WorkerDied(Exception):
    """This step kills the worker group (a poison request)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the simulator knows about a request behind an admission, found by its sampling seed (unique per request)."""

    key: int
    namespace: int
    may_hit: bool
    broken_at: int = -1  # position whose computation yields NaN in sequence 0
    poison_at: int = -1  # position whose computation kills the group
    dead_at: int = -1  # number of tokens of sequence 0 after which no token is left


@dataclass(slots=True)
class Row:
    """One row of the worker. `chain` and `table` are truth that the row knows about itself, to be compared with memory."""

    seed: int
    sequence: int
    identity: Identity
    chain: NDArray[np.uint64]
    table: NDArray[np.int64]
    num_blocks: int
    num_tokens: int
    num_computed: int
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    tokens: list[int]
    first_owned: int  # index of the first block this row may write to
    admitted_step: int
    constrained: bool
    broken: bool = False
    run: list[int] = field(default_factory=list)  # what its constraint makes it say next
    is_told: bool = True  # the scheduler has heard of the run

    @property
    def decoding(self) -> bool:
        """Whether it has sampled (a chunk reached the end of its known tokens) and has not reached its limit."""
        return len(self.tokens) < self.num_tokens < self.max_tokens


@dataclass(slots=True)
class Executed:
    """What one step did, for the auditor. sampled: (row's seed, sequence) in result order."""

    result: StepResult
    sampled: list[tuple[int, int]] = field(default_factory=list)


class OracleWorker:
    """Executes plans in order; `identify` maps a sampling seed to the request's Identity."""

    def __init__(self, identify: Callable[[int], Identity]) -> None:
        self._identify = identify
        self.rows: dict[int, Row] = {}
        self.compiled: set[bytes] = set()  # constraints, of this life of the worker

    def start_epoch(self, start: StartEpoch) -> None:
        self.start = start
        self.rows = {}
        self._logprobs = OracleLogprobs(VOCABULARY)
        self.held = [0] * start.num_blocks  # rows whose table holds the block
        self.cells = np.full((start.num_blocks, start.block_size), UNWRITTEN, dtype=np.uint64)
        self.writers = np.full(start.num_blocks, -1, dtype=np.int64)  # seed of the last writer
        self.labels = np.full(start.num_blocks, -1, dtype=np.int64)  # namespace of the last writer

    # Applying a plan ---------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> Executed:
        """Apply one plan and say what it sampled. Raises Violation, or WorkerDied for a poison row."""
        for number in view_u32(plan.released).tolist():
            row = self.rows.pop(number, None)
            if row is None:
                raise Violation(f"step {plan.step} releases row {number}, which is empty")
            for block in row.table[: row.num_blocks].tolist():
                self.held[block] -= 1
        self._copy(plan)
        for admission in plan.admissions:
            self._admit(admission, plan.step)
        grown_rows, grown_blocks = view_u32(plan.grown_rows).tolist(), view_u32(plan.grown_blocks).tolist()
        if len(grown_rows) != len(grown_blocks):
            raise Violation(f"step {plan.step}: grown columns differ in length")
        for number, block in zip(grown_rows, grown_blocks):
            self._grow(self._row(number, plan.step, "grows"), number, block, plan.step)
        if plan.table_checksum and plan.table_checksum != self._checksum():
            raise Violation(f"step {plan.step}: the tables' checksum differs from the scheduler's")
        return self._compute(plan)

    def _checksum(self) -> int:
        return table_checksum((n, row.num_tokens, row.table[: row.num_blocks]) for n, row in sorted(self.rows.items()))

    def _row(self, number: int, step: int, what: str) -> Row:
        row = self.rows.get(number)
        if row is None:
            raise Violation(f"step {step} {what} row {number}, which is empty")
        return row

    def _copy(self, plan: StepPlan) -> None:
        sources, targets = view_u32(plan.copy_from).astype(np.int64), view_u32(plan.copy_to).astype(np.int64)
        if len(sources) != len(targets):
            raise Violation(f"step {plan.step}: copy columns differ in length")
        for target in targets.tolist():
            self._check_block(target, plan.step, "copies into")
            if self.held[target]:
                raise Violation(f"step {plan.step} copies into block {target}, held by rows {self._holders(target)}")
        if set(sources.tolist()) & set(targets.tolist()) or len(set(targets.tolist())) < len(targets):
            raise Violation(f"step {plan.step}: a copy's target is also a source or another target")
        self.cells[targets], self.labels[targets], self.writers[targets] = self.cells[sources], self.labels[sources], self.writers[sources]

    def _holders(self, block: int) -> list[int]:
        return [number for number, row in self.rows.items() if (row.table[: row.num_blocks] == block).any()]

    def _shares_since(self, number: int, block: int, step: int) -> bool:
        row = self.rows[number]
        return row.admitted_step == step and block in row.table[: row.first_owned]

    def _check_block(self, block: int, step: int, what: str) -> None:
        if block == NULL_BLOCK or not 0 < block < self.start.num_blocks:
            raise Violation(f"step {step} {what} block {block}: the null block, or outside the pool of {self.start.num_blocks}")

    def _admit(self, admission: Admission, step: int) -> None:
        start, number, tokens = self.start, admission.row, view_u32(admission.tokens).tolist()
        blocks = view_u32(admission.blocks).tolist()
        if number in self.rows or not 0 <= number < start.max_num_seqs:
            raise Violation(f"step {step} admits into row {number}: occupied, or outside 0 .. {start.max_num_seqs - 1}")
        if not 0 <= admission.num_computed_tokens < len(tokens) or not 0 < admission.num_prompt_tokens <= len(tokens):
            raise Violation(f"step {step} row {number}: computed {admission.num_computed_tokens} of {len(tokens)} tokens")
        if len(tokens) >= admission.max_tokens or admission.max_tokens > start.max_model_len:
            raise Violation(f"step {step} row {number}: {len(tokens)} tokens, max_tokens {admission.max_tokens}, no room to sample")
        if len(set(blocks)) < len(blocks):
            raise Violation(f"step {step} row {number}: a block twice in one table")
        first_owned = admission.num_computed_tokens // start.block_size
        if len(blocks) * start.block_size < admission.num_computed_tokens:
            raise Violation(f"step {step} row {number}: computed tokens without a block")
        for index, block in enumerate(blocks):
            self._check_block(block, step, "admits with")
            if index >= first_owned and self.held[block]:
                raise Violation(f"step {step} row {number}: block {block} is to be written but rows {self._holders(block)} hold it")
            self.held[block] += 1
        constraint = admission.sampling.constraint
        if constraint is not None and constraint_digest(constraint) not in self.compiled:
            raise Violation(f"step {step} row {number}: its constraint is not compiled")
        self._logprobs.admit(admission)
        chain = np.empty(start.max_model_len + 1, dtype=np.uint64)
        value = EMPTY
        for index, token in enumerate(tokens):
            chain[index] = value = extend(value, token)
        table = np.zeros(start.max_model_len // start.block_size + 2, dtype=np.int64)
        table[: len(blocks)] = blocks
        seed = admission.sampling.seed
        self.rows[number] = row = Row(
            seed=seed, sequence=admission.sequence, identity=self._identify(seed), chain=chain, table=table, num_blocks=len(blocks),
            num_tokens=len(tokens), num_computed=admission.num_computed_tokens, max_tokens=admission.max_tokens,
            min_tokens=admission.min_tokens, stop_ids=frozenset(view_u32(admission.stop_token_ids).tolist()), tokens=tokens,
            first_owned=first_owned, admitted_step=step, constrained=admission.sampling.constraint is not None,
        )  # fmt: skip
        for position in range(admission.num_prompt_tokens, len(tokens)) if row.constrained else ():
            self._follow(row, tokens[position], int(chain[position]))

    def _grow(self, row: Row, number: int, block: int, step: int) -> None:
        self._check_block(block, step, "grows by")
        # Only who is admitted in this very step may share a block that its writer gets in this step.
        sharing = [n for n in self._holders(block) if not self._shares_since(n, block, step)] if self.held[block] else []
        if sharing:
            raise Violation(f"step {step} row {number} grows by block {block}, held by rows {sharing}")
        if row.num_blocks >= len(row.table):
            raise Violation(f"step {step} row {number} holds more blocks than max_model_len needs")
        row.table[row.num_blocks] = block
        row.num_blocks += 1
        self.held[block] += 1

    # Computing ---------------------------------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan) -> Executed:
        paused = set(view_u32(plan.paused).tolist())
        for number in paused:
            self._row(number, plan.step, "pauses")
        decoding = [n for n, row in sorted(self.rows.items()) if n not in paused and row.decoding]
        chunks, jumps = self._chunks(plan), self._jumps(plan)
        if not jumps.keys() <= set(decoding):
            raise Violation(f"step {plan.step}: a row that does not decode takes forced tokens")
        if (chunks or jumps) and plan.num_steps > 1:
            raise Violation(f"step {plan.step}: a plan of {plan.num_steps} steps carries prefill chunks")
        if plan.num_steps > 1 and any(row.constrained for row in self.rows.values()):
            raise Violation(f"step {plan.step}: a plan of {plan.num_steps} steps holds a constrained row")
        if not set(decoding).isdisjoint(chunks):
            raise Violation(f"step {plan.step}: a decoding row got a chunk")
        num_chunked = sum(chunks.values()) + sum(map(len, jumps.values()))
        if len(decoding) + num_chunked > self.start.max_num_batched_tokens:
            raise Violation(f"step {plan.step}: {len(decoding)} decodes + {num_chunked} tokens in chunks exceed the budget")
        for number, taken in jumps.items():
            self._take_forced(number, self.rows[number], taken, plan.step)
        finishing = {n for n, length in chunks.items() if self.rows[n].num_computed + length == self.rows[n].num_tokens}
        sampling = sorted(finishing.union(decoding))
        lengths = {**dict.fromkeys(decoding, 1), **chunks} | {number: 1 + len(taken) for number, taken in jumps.items()}
        executed = Executed(StepResult(epoch=plan.epoch, step=plan.step, rank=0))
        tokens: list[int] = []
        flags: list[int] = []
        ended: set[int] = set()
        for _ in range(plan.num_steps):
            self._write_and_read({n: length for n, length in lengths.items() if n not in ended}, plan.step)
            for number in sampling:
                token, flag = (0, FLAG_IDLE) if number in ended else self._sample(self.rows[number])
                tokens.append(token)
                flags.append(flag)
                if flag & (FLAG_STOP | FLAG_BAD | FLAG_DEAD) or self.rows[number].num_tokens >= self.rows[number].max_tokens:
                    ended.add(number)
        executed.sampled = [(self.rows[n].seed, self.rows[n].sequence) for n in sampling]
        shape = (plan.num_steps, len(sampling))
        told = self._logprobs.fields(
            plan, np.array(sampling, np.int64), np.array(tokens, np.int64).reshape(shape), np.array(flags, np.uint8).reshape(shape),
            {number: np.array(row.tokens, np.uint32) for number, row in self.rows.items()},
        )  # fmt: skip
        executed.result = StepResult(
            epoch=plan.epoch, step=plan.step, rank=0, tokens=pack_u32(tokens), flags=bytes(flags), device_us=1, **told,
            **self._runs(sampling),
        )  # fmt: skip
        return executed

    def _chunks(self, plan: StepPlan) -> dict[int, int]:
        columns = [view_u32(c).tolist() for c in (plan.chunk_rows, plan.chunk_starts, plan.chunk_lengths)]
        if len({len(c) for c in columns}) > 1:
            raise Violation(f"step {plan.step}: chunk columns differ in length")
        chunks: dict[int, int] = {}
        for number, start, length in zip(*columns):
            row = self._row(number, plan.step, "prefills")
            if number in chunks or start != row.num_computed or length < 1 or start + length > len(row.tokens):
                span = f"[{start}, {start + length}) of {len(row.tokens)}, computed {row.num_computed}"
                raise Violation(f"step {plan.step} row {number}: chunk {span}")
            chunks[number] = length
        return chunks

    def _jumps(self, plan: StepPlan) -> dict[int, list[int]]:
        """The forced tokens that rows take, without the one before them, which must be the row's newest."""
        counts, tokens = view_u32(plan.forced_counts).tolist(), view_u32(plan.forced_tokens).tolist()
        rows = view_u32(plan.forced_rows).tolist()
        if len(rows) != len(counts) or sum(counts) != len(tokens) or sorted(set(rows)) != rows or min(counts, default=2) < 2:
            raise Violation(f"step {plan.step}: forced columns {rows}, {counts} and {len(tokens)} tokens")
        jumps: dict[int, list[int]] = {}
        for number, count in zip(rows, counts):
            row = self._row(number, plan.step, "forces")
            newest, *jumps[number] = tokens[:count]
            tokens = tokens[count:]
            if not row.broken and extend(int(row.chain[row.num_tokens - 2]), newest) != int(row.chain[row.num_tokens - 1]):
                raise Violation(f"step {plan.step} row {number}: forced tokens behind {newest}, which is not its newest")
        return jumps

    def _take_forced(self, number: int, row: Row, taken: list[int], step: int) -> None:
        """They join the row's tokens before it computes."""
        if not row.broken and row.run[: len(taken)] != taken:
            raise Violation(f"step {step} row {number}: takes {taken}, forced are {row.run}")
        if row.num_tokens + len(taken) >= row.max_tokens:
            raise Violation(f"step {step} row {number}: {len(taken)} forced tokens leave no room to sample")
        for token in taken:
            row.chain[row.num_tokens] = extend(int(row.chain[row.num_tokens - 1]), token)
            row.num_tokens += 1
        del row.run[: len(taken)]

    def _follow(self, row: Row, token: int, chain: int) -> None:
        """The row's output has one token more. chain: value after it."""
        if row.run:
            row.run.pop(0)
        else:
            row.run = forced_run(chain, row.stop_ids)
            row.is_told = False

    def _runs(self, sampling: list[int]) -> dict[str, bytes]:
        """Runs that the scheduler has not heard of; of rows that tell log-probabilities none, nor anything from a dead end on."""
        told: dict[int, list[int]] = {}
        for at, number in enumerate(sampling):
            row = self.rows[number]
            if row.run and not row.is_told and not self._logprobs.tells(number):
                dead_at = row.identity.dead_at if row.sequence == 0 and row.identity.dead_at > 0 else row.max_tokens
                told[at] = row.run[: max(0, dead_at - row.num_tokens)]
            row.is_told = True
        told = {at: run for at, run in told.items() if run}
        tokens = [token for run in told.values() for token in run]
        return {
            "forced_at": pack_u32(list(told)), "forced_counts": pack_u32([len(run) for run in told.values()]),
            "forced_tokens": pack_u32(tokens),
        }  # fmt: skip

    def _write_and_read(self, lengths: dict[int, int], step: int) -> None:
        """All rows write their new cells, then all read their whole context: as layers do, so that a step may share what it computes."""
        size = self.start.block_size
        for number, length in lengths.items():
            row = self.rows[number]
            first, last = row.num_computed, row.num_computed + length
            identity = row.identity
            if first <= identity.poison_at < last:
                raise WorkerDied
            if last > row.num_blocks * size:
                raise Violation(f"step {step} row {number} writes position {last - 1} but holds {row.num_blocks} blocks of {size}")
            if first // size < row.first_owned:
                raise Violation(f"step {step} row {number} writes into a block it shares")
            if row.sequence == 0 and first <= identity.broken_at < last:
                row.broken = True
            blocks = row.table[first // size : (last - 1) // size + 1]
            self.writers[blocks], self.labels[blocks] = row.seed, identity.namespace
            positions = np.arange(first, last)
            values = row.chain[first:last] if not row.broken else np.uint64(BROKEN)
            self.cells[row.table[positions // size], positions % size] = values
            row.num_computed = last
        for number in lengths:
            self._read_back(number, self.rows[number], step)

    def _read_back(self, number: int, row: Row, step: int) -> None:
        size, length = self.start.block_size, row.num_computed
        blocks = row.table[: -(-length // size)]
        read = self.cells[blocks].reshape(-1)[:length]
        wrong = np.flatnonzero(read != row.chain[:length])
        if len(wrong) and not (read[wrong] == BROKEN).all():
            position = int(wrong[read[wrong] != BROKEN][0])
            block, what = int(row.table[position // size]), "nothing" if read[position] == UNWRITTEN else "another token's KV"
            raise Violation(f"step {step} row {number} reads {what} at position {position}, block {block} (row computed {length})")
        row.broken = row.broken or bool(len(wrong))
        if (self.labels[blocks] != row.identity.namespace).any():
            raise Violation(f"step {step} row {number} reads a block of another namespace")
        if not row.identity.may_hit and (self.writers[blocks] != row.seed).any():
            raise Violation(f"step {step} row {number} bypasses the prefix cache but reads another request's block")

    def _sample(self, row: Row) -> tuple[int, int]:
        banned = row.stop_ids if row.num_tokens < row.min_tokens else frozenset()
        chain = int(row.chain[row.num_tokens - 1])
        token = row.run[0] if row.run else sample(chain, row.seed, row.sequence, banned)
        if row.broken:
            token = VOCABULARY - 1
        row.chain[row.num_tokens] = extend(chain, token)
        if row.constrained:
            self._follow(row, token, int(row.chain[row.num_tokens]))
        row.num_tokens += 1
        if not row.broken and row.sequence == 0 and row.num_tokens - 1 == row.identity.dead_at:
            return 0, FLAG_DEAD
        flag = FLAG_BAD if row.broken else FLAG_STOP if token in row.stop_ids and not banned else 0
        return token, flag
