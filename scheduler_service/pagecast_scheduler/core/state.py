"""Everything a scheduler knows, in one place, and the events of a sequence's life that move it from one state to the next.

Planning (`planning`) and results (`applying`) decide; the methods here keep rows, blocks, queue and outputs consistent while it happens.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagecast_scheduler.core.block_pool import Blocks
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.constraints import Constraints
from pagecast_scheduler.core.estimates import Estimates
from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.outputs import Cohort, Outputs
from pagecast_scheduler.core.plan_builder import Jump
from pagecast_scheduler.core.queue import WaitingQueue
from pagecast_scheduler.core.request import NEVER, Request, Sequence, Status
from pagecast_scheduler.core.rows import EMPTY, Index, Rows
from pagecast_scheduler.core.tenants import Tenants
from pagecast_scheduler.core.timers import Timers
from pagecast_wire.intake import Finished, Phase, Progress, Usage
from pagecast_wire.sampling import FinishReason


class ResultError(ValueError):
    """A result whose columns do not have the shape that its plan asks for; a fault of the worker group."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that was sent and whose result is not applied.

    cohort: rows that sample, ascending. num_freed: Rows.num_freed when it was made: while equal, every generation still holds.
    entering: rows that sample their first token since admission. limits: per sampling row how many of the num_steps it takes
    part in (None: all in all). telling: (row, generation) of rows whose chunk tells log-probabilities of the prompt.
    jumps: rows that take forced tokens before the one that they sample. num_computed_tokens: prompt tokens and forced ones.
    """

    step: int
    num_steps: int
    cohort: Cohort
    num_freed: int
    planned_at: int
    entering: list[tuple[int, int]]
    limits: Index | None = None
    num_computed_tokens: int = 0
    telling: list[tuple[int, int]] = field(default_factory=list)
    jumps: list[Jump] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Detached:
    """A sequence whose last token is planned: its row is free, its blocks stay until its last results are in.

    num_pending: results still to come. blocks: empty once memory ran short and they were freed early; given_back: what they were then."""

    seq: Sequence
    num_pending: int
    blocks: Blocks
    given_back: Blocks = field(default_factory=lambda: EMPTY)


@dataclass(slots=True)
class Totals:
    """Counters since the scheduler began."""

    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    num_preemptions: int = 0
    num_recoveries: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    forced_tokens: int = 0  # of output_tokens, those that no step had to draw


@dataclass(slots=True, eq=False)
class State:
    """step: number of the epoch's last plan; applied_step: of the last one whose result is in; in_flight: those between, oldest first.
    requests, suspects: by key. detached: by row and its generation then (see Rows)."""

    config: SchedulerConfig
    epoch: int
    kv: KvManager
    rows: Rows
    tenants: Tenants
    queue: WaitingQueue
    step: int = 0
    applied_step: int = 0
    prefilled_in: int = 0  # the last step that computed part of a prompt
    began: int = 0  # the step in which an idle engine began, while every step since then has prefill and nobody is in a hurry; else 0
    arrived_at: int = -NEVER  # when the last request came
    held_until: int = -NEVER  # when the plan that was held back last may be made; -NEVER: the last one was not
    requests: dict[int, Request] = field(default_factory=dict)
    in_flight: deque[InFlight] = field(default_factory=deque)
    detached: dict[tuple[int, int], Detached] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)  # rows freed since the last plan
    steady: tuple[int, Cohort] | None = None  # (Rows.version, cohort of the stepping rows)
    limit_check: tuple[int, int] = (-1, 0)  # (Rows.version, step before which none of its stepping rows reaches its limit)
    timers: Timers = field(default_factory=Timers)
    outputs: Outputs = field(default_factory=Outputs)
    estimates: Estimates = field(default_factory=Estimates)
    totals: Totals = field(default_factory=Totals)
    num_queued_requests: int = 0  # never admitted yet
    num_queued_tokens: int = 0
    orders: int = 0  # sequences accepted so far, numbered in order of arrival
    suspects: dict[int, Request] = field(default_factory=dict)  # requests that must run alone
    alone: Request | None = None  # the suspect that runs alone now
    next_report: int = 0  # when those who wait are told their places again
    constraints: Constraints = field(default_factory=Constraints)

    @classmethod
    def create(cls, config: SchedulerConfig, epoch: int) -> "State":
        tenants = Tenants(config.max_tenants)
        rows = Rows(config.max_num_seqs, config.max_model_len)
        return cls(config, epoch, KvManager(config), rows, tenants, WaitingQueue(tenants, config.ageing_us, config.max_model_len))

    def cohort(self) -> Cohort:
        """The cohort of all stepping rows, made anew only when they change."""
        if self.steady is None or self.steady[0] != self.rows.version:
            self.steady = (self.rows.version, Cohort(self.rows, self.rows.stepping_rows()))
        return self.steady[1]

    def isolating(self) -> bool:
        """Whether suspects of having crashed the workers wait for their turn alone, so that nobody else may enter."""
        return any(not request.paused for request in self.suspects.values())

    def enqueue(self, seq: Sequence, now: int) -> None:
        """Wait in the queue, or outside it while the request is paused or its constraint is being compiled."""
        if not seq.request.paused and not seq.request.preparing and not seq.queued:
            self.queue.push(seq, now)

    def release_held(self, request: Request, now: int) -> None:
        """The first sequence has its whole prompt planned, or ended: the siblings may share it."""
        held, request.held = request.held, []
        for seq in held:
            self.enqueue(seq, now)

    def leave_row(self, seq: Sequence) -> tuple[Blocks, int]:
        """Copy the sequence's applied tokens out of its row and free the row. Its blocks go to the caller, and how many of them are full of
        tokens whose KV is certain."""
        row = seq.row
        computed, known = self.rows.computed(row), seq.num_tokens
        # Chunks were counted as they were planned. A decode is computed again if it was in flight when the row was last taken away.
        seq.num_recomputed_tokens += max(0, min(computed, seq.num_computed_before) - known)
        seq.num_computed_before = max(seq.num_computed_before, computed)
        count = int(self.rows.num_tokens[row])
        if count > len(seq.tokens):
            grown = np.empty(count, np.uint32)
            grown[:known] = seq.tokens[:known]
            seq.tokens = grown
        if count > known:  # the prompt itself may be a read-only view of the message
            seq.tokens[known:count] = self.rows.tokens[row, known:count]
        certain = min(count, self._certain(row))
        seq.num_tokens = count
        blocks = self.kv.close_row(row)
        self.rows.close(row)
        self.released.append(row)
        return blocks, min(certain // self.config.block_size, len(blocks))

    def _leave(self, seq: Sequence, blocks: Blocks, full: int) -> None:
        """The sequence needs its blocks no more, of which the first `full` can be found again."""
        self.kv.leave(blocks, seq.chain, seq.tokens, 0 if seq.request.submit.bypass_prefix_cache else full)

    def _certain(self, row: int) -> int:
        """Tokens whose KV is written by steps that were applied, and so is right: all but the newest one of a decoding row."""
        if self.rows.decoding[row]:
            return int(self.rows.num_tokens[row]) - 1
        return 0

    def detach(self, row: int) -> None:
        """The last token of the row's sequence is planned: free the row, keep the blocks until the results are in."""
        seq = self.rows.owner(row)
        key = (row, int(self.rows.generation[row]))
        pending = int(self.rows.num_planned[row] - self.rows.num_tokens[row])
        tokens = np.empty(seq.request.max_tokens, np.uint32)
        tokens[: seq.num_tokens] = seq.tokens[: seq.num_tokens]
        seq.tokens = tokens
        blocks, _ = self.leave_row(seq)  # `finish` publishes all of them when the results are in
        self.detached[key] = Detached(seq, pending, blocks)
        seq.detached = key

    def holder(self, row: int, generation: int) -> Sequence | None:
        """Whose row it was at that generation, if that sequence still waits for results of it."""
        if self.rows.generation[row] == generation:
            return self.rows.owner(row)
        entry = self.detached.get((row, generation))
        return None if entry is None else entry.seq

    def free_detached(self) -> bool:
        """Memory is short: blocks of sequences that only await their last results are given back now. False if there were none."""
        freed = False
        for entry in self.detached.values():
            if len(entry.blocks):
                self.kv.forget_provisional(entry.blocks)  # nobody could drop them later should their step go wrong
                self.kv.pool.give_back(entry.blocks)
                entry.given_back, entry.blocks = entry.blocks, entry.blocks[:0]
                freed = True
        return freed

    def requeue(self, seq: Sequence, now: int, keep_content: bool = True) -> None:
        """RUNNING -> WAITING at the head of its class, with the tokens applied so far."""
        blocks, full = self.leave_row(seq)
        self._leave(seq, blocks, full if keep_content else 0)
        seq.status = Status.WAITING
        seq.resumed = True
        self.enqueue(seq, now)

    def preempt(self, seq: Sequence, now: int, keep_content: bool = True) -> None:
        """Take a running sequence's row and blocks; it computes again later."""
        seq.num_preemptions += 1
        self.totals.num_preemptions += 1
        self.requeue(seq, now, keep_content)
        self.report(seq, Phase.PAUSED_SLOW_CONSUMER if seq.request.paused else Phase.QUEUED)

    def reattach(self, seq: Sequence, now: int) -> None:
        """A detached sequence's last results cannot be trusted: it waits again with what was applied."""
        assert seq.detached is not None
        self.kv.forget(self.detached[seq.detached].blocks)
        self.kv.pool.give_back(self.detached.pop(seq.detached).blocks)
        seq.detached = None
        seq.status = Status.WAITING
        seq.resumed = True
        self.enqueue(seq, now)

    def finish(
        self, seq: Sequence, reason: FinishReason, now: int, keep: int | None = None, stop_token_id: int = -1, constraint_fault: int = 0
    ) -> None:
        """End one sequence, whatever state it is in. keep: output tokens that count (default: all applied)."""
        request, keep_content = seq.request, reason is not FinishReason.NUMERIC_FAULT
        if seq.row >= 0:
            blocks, full = self.leave_row(seq)
            self._leave(seq, blocks, full if keep_content else 0)
        elif seq.detached is not None:
            blocks, seq.detached = self.detached.pop(seq.detached).blocks, None
            full = min(max(0, seq.num_tokens - 1) // self.config.block_size, len(blocks))
            self._leave(seq, blocks, full if keep_content else 0)
        elif seq.queued:
            self.queue.remove(seq)
        if seq in request.held:
            request.held.remove(seq)
        seq.status = Status.FINISHED
        seq.end = Finished(request.key, seq.index, reason, usage(seq, now, keep), stop_token_id, constraint_fault)
        self.outputs.add_finished(request.slot, seq.end)
        request.num_open -= 1
        if request.num_open == 0:
            self._close(request)
        elif request.held and seq is request.sequences[0]:
            self.release_held(request, now)

    def start(self, request: Request) -> None:
        """First admission: the request no longer counts against the queue's bounds."""
        if not request.started:
            request.started = True
            self.num_queued_requests -= 1
            self.num_queued_tokens -= request.num_prompt_tokens

    def report(self, seq: Sequence, phase: Phase, position: int = 0) -> None:
        """Tell the front end of a change of phase, or of progress within it."""
        request = seq.request
        if any(other.status is not Status.FINISHED for other in request.sequences[: seq.index]):
            return  # the first open sequence speaks for the request
        total = int(self.rows.num_tokens[seq.row]) if seq.row >= 0 else seq.num_tokens
        done = min(self.rows.computed(seq.row), total) if seq.row >= 0 else 0
        self.outputs.add_progress(request.slot, Progress(request.key, phase, position, done, total, seq.num_cached_tokens))

    def _close(self, request: Request) -> None:
        if not request.started:
            self.start(request)
        del self.requests[request.key]
        self.tenants.leave(request.tenant)
        self.suspects.pop(request.key, None)
        if self.alone is request:
            self.alone = None


def usage(seq: Sequence, now: int, keep: int | None) -> Usage:
    """Token counts and times (microseconds since arrival) of one sequence."""
    arrival = seq.request.arrival
    output = seq.num_output_tokens
    return Usage(
        prompt_tokens=seq.request.num_prompt_tokens, cached_tokens=seq.num_cached_tokens,
        output_tokens=output if keep is None else min(keep, output), recomputed_tokens=seq.num_recomputed_tokens,
        queue_us=max(0, (now if seq.admitted_at < 0 else seq.admitted_at) - arrival),
        first_token_us=max(0, seq.first_token_at - arrival) if seq.first_token_at >= 0 else 0, total_us=max(0, now - arrival),
        num_preemptions=seq.num_preemptions, num_recoveries=seq.num_recoveries,
    )  # fmt: skip
