"""Making one step's plan: decodes first, then prefill chunks of running rows, then admissions, all under one token budget."""

import numpy as np

from pagecast_scheduler.core import forced, policy
from pagecast_scheduler.core.fitting import fit_budget
from pagecast_scheduler.core.outputs import Cohort
from pagecast_scheduler.core.pacing import pace_budget
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.prefilling import admit_waiting, plan_chunks
from pagecast_scheduler.core.rows import Index
from pagecast_scheduler.core.scarcity import make_room, rank
from pagecast_scheduler.core.state import InFlight, State
from pagecast_wire.checksum import table_checksum
from pagecast_wire.plan import StepPlan


def make_plan(s: State, now: int) -> StepPlan | None:
    """The next plan, or None if no row has anything to do.

    A row that gives up its place may free blocks too late for the decodes before it: what they make possible is planned at once, as
    with nothing in flight no result would ask for a plan again.
    """
    while True:
        num_released = len(s.released)
        draft = _draft(s, now)
        if not draft.is_empty:
            return _commit(s, draft, now)
        if len(s.released) == num_released:
            return None


def _draft(s: State, now: int) -> PlanDraft:
    draft = PlanDraft()
    _plan_decodes(s, draft, now)
    budget = s.config.max_num_batched_tokens - len(draft.stepping)
    if s.rows.forced:
        budget = forced.plan_jumps(s, draft, budget)
    if s.config.step_sizes and len(s.queue) > s.rows.num_free:
        budget = fit_budget(s, draft, budget, now)
    is_open = bool(s.rows.num_free or s.rows.num_paused)
    if s.rows.prefilling or (is_open and len(s.queue)):
        budget = pace_budget(s, draft, budget, now)
    if s.rows.prefilling:
        budget = plan_chunks(s, draft, budget, now)
        is_open = bool(s.rows.num_free or s.rows.num_paused)
    if len(s.queue) and budget > 0 and is_open and not draft.stalled:  # blocks that come free are for decodes first
        admit_waiting(s, draft, budget, now)
    return draft


def _plan_decodes(s: State, draft: PlanDraft, now: int) -> None:
    """Every decoding row gets the block its next token needs; too few blocks cost somebody its place."""
    rows = s.rows
    draft.num_steps = _num_steps(s, now)
    if draft.num_steps > 1 and not _grow_for_steps(s, draft):
        draft.num_steps = 1
    if draft.num_steps == 1:
        short = rows.short_of_blocks()
        if len(short) and len(short) <= s.kv.pool.num_free:
            _grow(s, draft, short)
        elif len(short):
            _grow_scarce(s, draft, short, now)
    draft.stepping = s.rows.stepping_rows()
    if draft.stalled:
        draft.stepping = np.setdiff1d(draft.stepping, draft.stalled)


def _num_steps(s: State, now: int) -> int:
    max_steps = s.config.max_steps_per_plan or policy.automatic_steps(s.estimates.step_us)
    if max_steps == 1 or len(s.queue) or s.rows.prefilling or s.suspects or s.rows.num_constrained:
        return 1
    stepping = s.rows.stepping_rows()
    if not len(stepping):
        return 1
    most = int((s.rows.max_tokens[stepping] - s.rows.num_planned[stepping]).max())
    limit = s.timers.next()
    return policy.steps_in_plan(max_steps, most, None if limit is None else limit - now, s.estimates.step_us)


def _grow(s: State, draft: PlanDraft, rows: Index) -> None:
    draft.grow(rows, s.kv.grow_each(rows))
    s.rows.capacity[rows] += s.config.block_size


def _grow_for_steps(s: State, draft: PlanDraft) -> bool:
    """Blocks for num_steps tokens per row, within each row's limit. False, and nothing done, if there are not enough."""
    rows, size = s.rows, s.config.block_size
    stepping = s.rows.stepping_rows()
    planned = rows.num_planned[stepping]
    last_fed = planned + np.minimum(draft.num_steps, rows.max_tokens[stepping] - planned) - 1
    missing = np.maximum(0, -(-(last_fed - rows.capacity[stepping]) // size))
    if int(missing.sum()) > s.kv.pool.num_free:
        return False
    while len(wanting := stepping[missing > 0]):
        _grow(s, draft, wanting)
        missing -= missing > 0
    return True


def _grow_scarce(s: State, draft: PlanDraft, short: Index, now: int) -> None:
    """Fewer free blocks than rows that need one: the most urgent first, each by taking from whoever loses least."""
    by_urgency = sorted(short.tolist(), key=lambda row: rank(s, row, now))
    for row in by_urgency:
        if s.rows.owners[row] is None:
            continue  # preempted for a more urgent one
        if not make_room(s, draft, row, now):
            continue
        _grow(s, draft, np.array([row], np.int64))
        draft.touched.add(row)


def _commit(s: State, draft: PlanDraft, now: int) -> StepPlan:
    """The draft becomes the next step: lengths advance, the plan is in flight, rows at their limit are let go."""
    rows, stepping = s.rows, draft.stepping
    s.step += 1
    if draft.chunks:
        s.prefilled_in = s.step
    checksum = _checksum(s) if s.config.table_checksums else 0
    limits: Index | None = None
    if draft.num_steps > 1:
        limits = np.minimum(draft.num_steps, rows.max_tokens[stepping] - rows.num_planned[stepping])
        rows.num_planned[stepping] += limits
    elif draft.stalled:
        rows.num_planned[stepping] += 1
    else:
        rows.advance()
    if draft.jumps:
        forced.commit(s, draft)
    plan = draft.build(s.epoch, s.step, s.released, rows.sitting_out() if rows.num_paused else stepping[:0], checksum)
    s.released = []
    for row in draft.finishing:
        rows.start_decoding(row, int(s.kv.table.num_blocks[row]) * s.config.block_size)
    # Who samples now decodes in the next step, unless a row stalls: one cohort serves both.
    cohort = s.cohort() if not draft.stalled else Cohort(rows, np.setdiff1d(s.rows.stepping_rows(), draft.stalled))
    entering = [(row, int(rows.generation[row])) for row in draft.finishing]
    telling = [(row, int(rows.generation[row])) for row in draft.telling]
    num_computed = draft.num_prefill_tokens + sum(len(jump.tokens) for jump in draft.jumps)
    s.in_flight.append(
        InFlight(s.step, draft.num_steps, cohort, rows.num_freed, now, entering, limits, num_computed, telling, draft.jumps)
    )  # fmt: skip
    _let_go(s)
    return plan


def _let_go(s: State) -> None:
    """Rows whose last token is planned leave in the next plan. Looked for only in steps in which there can be one."""
    version, quiet_until = s.limit_check
    if version == s.rows.version and s.step < quiet_until:
        return
    for row in s.rows.at_limit().tolist():
        s.detach(row)
    s.limit_check = (s.rows.version, 0 if s.config.max_steps_per_plan != 1 else s.step + s.rows.steps_to_limit())


def _checksum(s: State) -> int:
    """Over the tables as this plan leaves them; 0 while a plan of several steps is in flight, whose early stops are not known here."""
    if any(record.num_steps > 1 for record in s.in_flight):
        return 0
    table = s.kv.table
    rows = [seq.row for seq in s.rows.running()]
    return table_checksum((row, int(s.rows.num_planned[row]), table.blocks[row, : table.num_blocks[row]]) for row in rows)
