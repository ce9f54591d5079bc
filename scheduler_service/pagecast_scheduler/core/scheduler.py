"""The scheduler core: values in, values out. No clock, no socket, no randomness; `now` is a monotonic time in microseconds.

`Scheduler` is the door; it owns a `State`. Requests enter through `intake`, steps are made by `planning`, results come in through
`applying`, and `recovery` starts a new epoch.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core import applying, gathering, intake, planning, recovery, waiting
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.prefix_cache import Change
from pagecast_scheduler.core.request import NEVER, Request, Sequence, Status
from pagecast_scheduler.core.state import State
from pagecast_scheduler.core.waiting import Wait
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import Accepted, FrontendBatch, Phase, Progress, PromptLogprobs, Rejected, Submit, TokenLogprobs
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault, FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters for EngineStatus. Blocks exclude the null block. num_waiting: open sequences that do not run, whatever for. From
    prefix_tokens_asked on they count from the start: tokens, sequences preempted, and epochs that failed (num_recoveries); prompt_tokens
    are those that prefill computed."""

    epoch: int
    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_referenced: int
    num_blocks_cached: int
    prefix_tokens_asked: int
    prefix_tokens_hit: int
    num_preemptions: int
    num_recoveries: int
    output_tokens: int
    prompt_tokens: int
    forced_tokens: int


class Scheduler:
    """What the engine asks and tells. Methods that take a request's key ignore one that is not open."""

    def __init__(self, config: SchedulerConfig, epoch: int) -> None:
        self.state = State.create(config, epoch)

    def submit(self, submit: Submit, now: int) -> Accepted | Rejected:
        """Accept a request into the queue, or say why not."""
        s = self.state
        refusal = intake.check(s, submit)
        if refusal is not None:
            return refusal
        request = intake.build(s, submit, now)
        request.tenant = s.tenants.enter(submit.tenant)
        s.orders += submit.num_sequences
        request.num_open = len(request.sequences)
        s.requests[request.key] = request
        s.arrived_at = now
        if not request.started:
            s.num_queued_requests += 1
            s.num_queued_tokens += request.num_prompt_tokens
        s.timers.add(request)
        s.constraints.expect(request)
        position = len(s.queue)
        first, *request.held = request.sequences
        s.enqueue(first, now)
        if not (s.rows.num_active or s.in_flight or submit.bypass_prefix_cache):  # others of a list are still on their way
            s.kv.expect_lookup(first.chain, first.tokens, first.num_tokens)
        for seq in request.sequences:
            self._end_if_complete(seq, now)
        return Accepted(request.key, position)

    def abort(self, key: int, now: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End every sequence of a request, with the reason of whoever cancels it."""
        request = self.state.requests.get(key)
        if request is not None:
            self._end(request, reason, now)

    def stop_at(self, key: int, sequence: int, keep: int, now: int) -> None:
        """The front end found a stop text: the sequence ends with STOP and `keep` output tokens count."""
        request = self.state.requests.get(key)
        if request is None or not 0 <= sequence < len(request.sequences):
            return
        seq = request.sequences[sequence]
        if seq.status is not Status.FINISHED:
            self.state.finish(seq, FinishReason.STOP, now, keep=keep)

    def pause(self, key: int, paused: bool, now: int) -> None:
        """Flow control: sequences of a paused request sit out steps and keep their blocks; waiting ones stay out of the queue."""
        s = self.state
        request = s.requests.get(key)
        if request is None or request.paused == paused:
            return
        request.paused = paused
        for seq in request.sequences:
            self._pause_sequence(seq, paused, now)
        if paused and s.alone is request:  # others must not wait for its client
            s.alone = None
            for seq in request.sequences:
                if seq.row >= 0:
                    s.preempt(seq, now)

    def constraint_prepared(self, digest: bytes, fault: int, now: int) -> None:
        """Every rank has compiled a constraint, or one cannot: whoever waited for it enters the queue, or ends."""
        s = self.state
        for request in s.constraints.ready(digest, fault == ConstraintFault.NONE):
            for seq in request.sequences:
                if seq.status is Status.FINISHED:
                    continue
                if fault != ConstraintFault.NONE:
                    s.finish(seq, FinishReason.CONSTRAINT_FAILED, now, constraint_fault=fault)
                elif seq not in request.held:
                    s.enqueue(seq, now)

    def take_constraints(self) -> list[Constraint]:
        """Constraints that every rank is to be asked for, each answered by `constraint_prepared`; to be called while an epoch is open."""
        return self.state.constraints.take()

    def drop_frontend(self, slot: int, now: int, spared: Collection[int] = ()) -> None:
        """A front end vanished: its requests are cancelled and nobody is told. Those with a spared key go on for other readers."""
        for request in [r for r in self.state.requests.values() if r.slot == slot and r.key not in spared]:
            self._end(request, FinishReason.CANCELLED, now)
        if not spared:
            self.state.outputs.drop(slot)

    def request(self, key: int) -> Request | None:
        """The open request of this key."""
        return self.state.requests.get(key)

    def outputs_of(self, request: Request) -> tuple[bytes, ...]:
        """Applied output tokens of each sequence, as u32 columns."""
        return tuple(self._known_tokens(seq)[request.num_prompt_tokens :].astype("<u4").tobytes() for seq in request.sequences)

    def untold_logprobs(self, request: Request) -> tuple[list[TokenLogprobs], list[PromptLogprobs]]:
        """Records of output and prompt tokens that `take_batches` has not given yet, though `outputs_of` has their tokens."""
        return self.state.outputs.untold_logprobs(request.slot, request.key)

    def _known_tokens(self, seq: Sequence) -> NDArray[np.uint32]:
        rows = self.state.rows
        return rows.tokens[seq.row, : rows.num_tokens[seq.row]] if seq.row >= 0 else seq.tokens[: seq.num_tokens]

    def start_epoch(self) -> StartEpoch:
        """The message that opens the current epoch."""
        c = self.state.config
        return StartEpoch(self.state.epoch, c.num_blocks, c.block_size, c.max_num_seqs, c.max_model_len, c.max_num_batched_tokens)

    def plan_step(self, now: int) -> StepPlan | None:
        """The next plan, or None: nothing to do, or max_plans_in_flight reached."""
        s = self.state
        self.expire(now)
        s.held_until = -NEVER
        if len(s.in_flight) >= s.config.max_plans_in_flight or not (s.rows.num_active or len(s.queue)):
            return None
        if len(s.queue):
            self._report_positions(now)
        s.held_until = gathering.held_until(s, now)
        if s.held_until > now:
            return None
        was_idle, hurried = not (s.rows.num_active or s.in_flight), s.queue.is_hurried(now)
        plan = planning.make_plan(s, now)
        if plan is not None:
            gathering.note_plan(s, was_idle, hurried, bool(plan.chunk_lengths))
        return plan

    def apply_result(self, result: StepResult, now: int) -> None:
        """Take in what a plan produced; results of another epoch and duplicates are ignored. Raises state.ResultError."""
        applying.apply_result(self.state, result, now)

    def fail_epoch(self, now: int, loss: recovery.Loss = recovery.Loss.CRASH) -> None:
        """The worker group is lost: a new epoch begins, running sequences wait again with their history."""
        recovery.fail_epoch(self.state, now, loss)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be done that only later calls need."""
        return self.state.kv.is_settled

    def settle(self, most: int) -> None:
        """Do, for at most so many ended sequences, what later calls need; else they do it themselves. No answer depends on it."""
        self.state.kv.settle(most)

    def take_batches(self) -> list[tuple[int, FrontendBatch]]:
        """All that front ends have not been told yet: (front end slot, batch), one per slot."""
        return self.state.outputs.take(self.state.applied_step)

    def next_wakeup(self) -> int | None:
        """When time alone changes something: a limit falls due, or the plan that the last `plan_step` held back is held no longer."""
        held, limit = self.state.held_until, self.state.timers.next()
        if held == -NEVER:
            return limit
        return held if limit is None else min(held, limit)

    def requests(self) -> list[Request]:
        """Every open request, oldest first."""
        return list(self.state.requests.values())

    def computed_tokens(self, seq: Sequence) -> int:
        """Tokens of a sequence whose KV is there, or planned."""
        return self.state.rows.computed(seq.row) if seq.row >= 0 else 0

    def blocks_held(self, request: Request) -> int:
        """Blocks in the tables of a request's rows; shared ones count for each."""
        return sum(int(self.state.kv.table.num_blocks[seq.row]) for seq in request.sequences if seq.row >= 0)

    def tenant_tokens(self, request: Request) -> tuple[int, int]:
        """Tokens served so far to the request's tenant, and to the least served active one."""
        return int(self.state.tenants.served[request.tenant]), self.state.tenants.least_served()

    def explain(self, now: int) -> dict[int, Wait]:
        """By key, why each open request is not running."""
        return waiting.explain(self.state, self.state.held_until > now, now)

    def watch_cache(self) -> None:
        """From here on changes of the prefix cache are noted until they are taken."""
        cache = self.state.kv.cache
        if cache.changes is None:
            cache.changes = []

    def take_cache_changes(self) -> list[Change]:
        """Changes of the prefix cache since the last call, in order; none while nobody watches."""
        return self.state.kv.take_changes()

    def cached_blocks(self) -> list[Change]:
        """Every block that can be found now."""
        return self.state.kv.cache.cached()

    def reset_prefix_cache(self) -> int:
        """Nobody finds any more what is cached now. Returns the number of blocks forgotten; what is being computed stays."""
        return self.state.kv.forget_all()

    def next_limit(self) -> int | None:
        """When the next deadline, time budget or queue limit falls due."""
        return self.state.timers.next()

    def stats(self) -> SchedulerStats:
        s, pool, totals = self.state, self.state.kv.pool, self.state.totals
        waiting = sum(r.num_open for r in s.requests.values()) - s.rows.num_active - len(s.detached)
        return SchedulerStats(
            epoch=s.epoch, step=s.step, num_running=s.rows.num_active + len(s.detached), num_waiting=waiting,
            num_blocks=pool.num_blocks - 1, num_blocks_referenced=pool.num_referenced, num_blocks_cached=pool.num_cached,
            prefix_tokens_asked=totals.prefix_tokens_asked, prefix_tokens_hit=totals.prefix_tokens_hit,
            num_preemptions=totals.num_preemptions, num_recoveries=totals.num_recoveries, output_tokens=totals.output_tokens,
            prompt_tokens=totals.prompt_tokens, forced_tokens=totals.forced_tokens,
        )  # fmt: skip

    def _end_if_complete(self, seq: Sequence, now: int) -> None:
        """A history may hold the whole output: the scheduler was lost before it could say so."""
        request = seq.request
        if not seq.num_output_tokens:
            return
        last = int(seq.tokens[seq.num_tokens - 1])
        if last in view_u32(request.submit.stop.stop_token_ids):
            self.state.finish(seq, FinishReason.STOP, now, stop_token_id=last)
        elif seq.num_tokens >= request.max_tokens:
            self.state.finish(seq, FinishReason.LENGTH, now)

    def _end(self, request: Request, reason: FinishReason, now: int) -> None:
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                self.state.finish(seq, reason, now)

    def _pause_sequence(self, seq: Sequence, paused: bool, now: int) -> None:
        s = self.state
        if seq.status is Status.FINISHED or seq.detached is not None:
            return
        if seq.row >= 0:
            s.rows.set_paused(seq.row, paused, int(s.kv.table.num_blocks[seq.row]) * s.config.block_size)
            resumed = Phase.DECODING if s.rows.decoding[seq.row] else Phase.PREFILLING
        else:
            if paused and seq.queued:
                s.queue.remove(seq)
            elif not paused and seq not in seq.request.held:
                s.enqueue(seq, now)
            resumed = Phase.QUEUED
        s.report(seq, Phase.PAUSED_SLOW_CONSUMER if paused else resumed)

    def expire(self, now: int) -> None:
        """Limits that fell due end their requests: the caller's deadline first, then the time budget, then the queue limit. Part of every
        `plan_step`; called alone while there is nobody to plan for."""
        due = self.state.timers.next()
        if due is None or due > now:
            return
        for request in self.state.timers.take_due(now):
            if not request.num_open:
                continue
            if request.deadline <= now:
                self._end(request, FinishReason.DEADLINE_EXCEEDED, now)
            elif request.budget_end <= now:
                self._end(request, FinishReason.TIME_LIMIT, now)
            elif request.queue_end <= now and not request.started:
                self._end(request, FinishReason.QUEUE_TIME_EXCEEDED, now)

    def _report_positions(self, now: int) -> None:
        """Now and then everybody who waits learns its place; between reports nobody pays for it."""
        s = self.state
        if now < s.next_report:
            return
        s.next_report = now + s.config.progress_interval_us
        for position, seq in enumerate(s.queue.waiting()):
            request = seq.request
            if seq is request.sequences[0] and now - request.arrival >= s.config.progress_interval_us:
                s.outputs.add_progress(
                    request.slot, Progress(request.key, Phase.QUEUED, position, 0, seq.num_tokens, seq.num_cached_tokens)
                )  # fmt: skip
