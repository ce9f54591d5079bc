"""Judges every plan at the moment it is made: order and number of plans, pauses, cancels, held blocks, victims, bounds, deadlines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from sim.oracle import Violation
from sim.streams import Streams

from pagecast_scheduler.core import invariants, policy, scarcity
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import FrontendBatch
from pagecast_wire.plan import StartEpoch, StepPlan


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What was true when a plan was made. paused: keys whose sequences must sit it out. present: keys with a row in it."""

    paused: frozenset[int]
    present: frozenset[int]


@dataclass(slots=True)
class PlanAudit:
    """Mirror of the rows as the plans made so far leave them: row -> (key, sequence)."""

    config: SchedulerConfig
    key_of_seed: dict[int, int]
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    epoch: int = 0
    step: int = 0
    facts: dict[int, PlanFacts] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    cancelled_at: dict[int, int] = field(default_factory=dict)  # key -> last step planned when it was cancelled
    held: list[tuple[int, frozenset[int]]] = field(default_factory=list)  # (until step, blocks) that another stream reads
    num_plans: int = 0
    computed: dict[tuple[int, int], int] = field(default_factory=dict)  # (key, sequence) -> most tokens whose KV was ever planned
    recomputed: dict[tuple[int, int], int] = field(default_factory=dict)  # (key, sequence) -> tokens planned once more
    reached: dict[int, int] = field(default_factory=dict)  # row -> tokens whose KV is planned since its admission

    def open(self, start: StartEpoch) -> None:
        """A new epoch: workers are empty and steps count from 1."""
        if start.epoch <= self.epoch:
            raise Violation(f"epoch {start.epoch} follows epoch {self.epoch}")
        self.epoch, self.step = start.epoch, 0
        self.rows.clear()
        self.reached.clear()
        self.facts.clear()
        self.cancelled_at.clear()
        self.held.clear()

    def on_plan(self, plan: StepPlan, num_unanswered: int, applied_step: int, num_free: int) -> None:
        """One plan, as the scheduler returned it. num_unanswered: plans sent before whose results are not in. num_free: blocks."""
        if plan.epoch != self.epoch or plan.step != self.step + 1:
            raise Violation(f"plan {plan.epoch}/{plan.step} follows {self.epoch}/{self.step}")
        if num_unanswered >= self.config.max_plans_in_flight:
            raise Violation(f"step {plan.step} makes {num_unanswered + 1} plans in flight of {self.config.max_plans_in_flight}")
        if not 1 <= plan.num_steps <= (self.config.max_steps_per_plan or policy.MOST_AUTOMATIC_STEPS):
            raise Violation(f"step {plan.step} asks for {plan.num_steps} steps of {self.config.max_steps_per_plan}")
        self.step = plan.step
        self.num_plans += 1
        for row in view_u32(plan.released).tolist():
            self.rows.pop(row, None)
        for admission in plan.admissions:
            self.rows[admission.row] = (self.key_of_seed[admission.sampling.seed], admission.sequence)
        held = frozenset(key for key, _ in self.rows.values())
        self.facts[plan.step] = PlanFacts(frozenset(self.paused), held)
        for key, step in self.cancelled_at.items():
            if plan.step >= step + 2 and key in held:
                raise Violation(f"step {plan.step}: request {key:#x}, cancelled after step {step}, still has a row (I9)")
        self._check_held(plan, applied_step)
        self._check_stalls(plan, num_free)

    def count_computed(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """After a plan: which tokens' KV it computes, and which of them were computed before. Rows let go by it end at their limit."""
        state = scheduler.state
        for admission in plan.admissions:
            self.reached[admission.row] = admission.num_computed_tokens
        for row, name in self.rows.items():
            live = state.rows.owners[row]
            if live is not None and (live.request.key, live.index) == name:
                end = state.rows.computed(row)
            else:
                detached = [entry.seq for (number, _), entry in state.detached.items() if number == row]
                names = [seq for seq in detached if (seq.request.key, seq.index) == name]
                end = names[-1].request.max_tokens - 1 if names else self.reached[row]
            start, before = self.reached[row], self.computed.get(name, 0)
            self.recomputed[name] = self.recomputed.get(name, 0) + max(0, min(end, before) - start)
            self.computed[name], self.reached[row] = max(before, end), max(start, end)

    def _check_held(self, plan: StepPlan, applied_step: int) -> None:
        """Blocks that something outside the stream of steps reads are not written before their step has been applied."""
        self.end_holds(applied_step)
        if self.held:
            written = set(view_u32(plan.grown_blocks).tolist())
            for admission in plan.admissions:
                first = admission.num_computed_tokens // self.config.block_size
                written.update(view_u32(admission.blocks)[first:].tolist())
            for until, blocks in self.held:
                if not blocks.isdisjoint(written):
                    raise Violation(f"step {plan.step} writes block {min(blocks & written)}, held until step {until}")

    def end_holds(self, applied_step: int) -> None:
        """Forget holds whose step has been applied."""
        self.held = [hold for hold in self.held if hold[0] > applied_step]

    def _check_stalls(self, plan: StepPlan, num_free: int) -> None:
        """A decode sits out because its client paused it or no block was left, never so that somebody else is admitted."""
        for row in view_u32(plan.paused).tolist():
            key = self.rows[row][0] if row in self.rows else -1
            if key not in self.paused and num_free and (plan.admissions or not plan.released):
                raise Violation(f"step {plan.step}: row {row} is held back with {num_free} blocks free")

    def on_executed(self, step: int, sampled: list[tuple[int, int]]) -> None:
        """The worker ran a plan: nobody who was paused when it was made may have sampled."""
        paused = self.facts[step].paused
        for seed, sequence in sampled:
            if self.key_of_seed[seed] in paused:
                raise Violation(f"step {step}: sequence {sequence} of a paused request sampled")

    def active_tenants(self, scheduler: Scheduler) -> dict[str, int]:
        """Tokens served of every tenant that has an open request."""
        state = scheduler.state
        return {request.submit.tenant: int(state.tenants.served[request.tenant]) for request in state.requests.values()}

    def check_queue_bound(self, scheduler: Scheduler) -> None:
        """I6: what was accepted and has never run stays within the queue's limits."""
        state = scheduler.state
        if state.num_queued_requests > self.config.max_queued_requests or state.num_queued_tokens > self.config.max_queued_tokens:
            raise Violation(f"{state.num_queued_requests} requests with {state.num_queued_tokens} tokens are queued")


def check_lift(scheduler: Scheduler, tenant: str, active: dict[str, int]) -> None:
    """A tenant that becomes active starts no lower than the least served active one. active: as before it came."""
    if active and tenant not in active:
        served = scheduler.state.tenants.served
        index = next(request.tenant for request in scheduler.state.requests.values() if request.submit.tenant == tenant)
        least = min(active.values())
        if served[index] < least:
            raise Violation(f"tenant {tenant} returns with {served[index]} tokens served, the least served active one has {least}")


def check_victim(candidates: list[policy.Running], requester: policy.Running, victim: policy.Running | None) -> None:
    """Never the oldest awake, never one more urgent than who asks unless it is paused, never who has a part in the plan; the least
    work lost."""
    if victim is None:
        return
    awake = [c for c in candidates if not c.paused]
    if awake and victim.order == min(c.order for c in awake) and not victim.paused:
        raise Violation(f"row {victim.row}, the oldest, is preempted")
    if victim.urgency < requester.urgency and not victim.paused:
        raise Violation(f"row {victim.row} of class {victim.urgency} is preempted for row {requester.row} of class {requester.urgency}")
    if victim.protected or victim.row == requester.row:
        raise Violation(f"row {victim.row} is preempted while it has a part in the plan")
    oldest = min((c.order for c in awake), default=-1)
    for other in candidates:
        allowed = other.urgency >= requester.urgency and not other.protected and other.row != requester.row and other.order != oldest
        if allowed and other.paused >= victim.paused and other.lost_tokens < victim.lost_tokens:
            raise Violation(f"row {victim.row} loses {victim.lost_tokens} tokens, row {other.row} would lose {other.lost_tokens}")


class _WatchedPolicy:
    """The policy module with its victim choice held against the rule; looks functions up at each call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(policy, name)

    def choose_victim(self, candidates: list[policy.Running], requester: policy.Running) -> policy.Running | None:
        victim = policy.choose_victim(candidates, requester)
        check_victim(candidates, requester, victim)
        return victim


@contextmanager
def watching_victims() -> Iterator[None]:
    """While inside, the search for room asks a policy that is checked."""
    original: ModuleType = scarcity.policy
    scarcity.policy = _WatchedPolicy()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        scarcity.policy = original  # type: ignore[attr-defined]


def check_core(scheduler: Scheduler) -> None:
    """The core's own laws (I1, I4, I6)."""
    try:
        invariants.check(scheduler)
    except invariants.InvariantError as error:
        raise Violation(f"invariant: {error}") from error


def check_bounds(scheduler: Scheduler, config: SchedulerConfig) -> None:
    """I6: what runs and what it holds stays within the limits."""
    stats = scheduler.stats()
    most = config.max_num_seqs * (1 + config.max_plans_in_flight)  # rows, and rows let go whose last results are in flight
    if stats.num_running > most:
        raise Violation(f"{stats.num_running} sequences run, at most {most} can")
    if stats.num_blocks_referenced + stats.num_blocks_cached > config.num_blocks - 1:
        raise Violation("more blocks in use than the pool has")


def check_limits(streams: Streams, now: int) -> None:
    """Called after an attempt to plan: whatever has run out by now must have ended."""
    for request in streams.open.values():
        plan, elapsed = request.plan, now - request.arrival - 1000 * request.brought_back  # it came back with whole milliseconds
        limits = [limit for limit in (plan.deadline_ms, plan.time_budget_ms) if limit >= 0]
        if any(limit * 1000 <= elapsed for limit in limits):
            raise Violation(f"request {plan.key:#x} goes on after {elapsed} us, past its limits {limits} ms")


def check_recomputed(audit: PlanAudit, streams: Streams, batch: FrontendBatch) -> None:
    """Usage names exactly the tokens that were computed again. A scheduler that was lost took its count with it."""
    for finished in batch.finished:
        request, name = streams.requests[finished.key], (finished.key, finished.sequence)
        wanted = audit.recomputed.get(name, 0)
        if not request.brought_back and finished.usage.recomputed_tokens != wanted:
            raise Violation(f"request {name[0]:#x} sequence {name[1]}: {finished.usage.recomputed_tokens} recomputed, it were {wanted}")


def check_idle(scheduler: Scheduler, streams: Streams) -> None:
    """At the end nobody runs, waits or holds a block (I1), and every stream has ended (I3)."""
    stats = scheduler.stats()
    if streams.open or stats.num_running or stats.num_waiting or stats.num_blocks_referenced:
        raise Violation(
            f"idle, but {len(streams.open)} streams are open, {stats.num_running} run, {stats.num_waiting} wait, "
            f"{stats.num_blocks_referenced} blocks are referenced"
        )
