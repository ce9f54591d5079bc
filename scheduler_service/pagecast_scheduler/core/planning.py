"""Making one step's plan: decodes first, then prefill chunks of running rows, then admissions, all under one token budget."""

import numpy as np

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.block_pool import Blocks
from pagecast_scheduler.core.intake import least_output
from pagecast_scheduler.core.outputs import Cohort
from pagecast_scheduler.core.plan_builder import PlanDraft, admission
from pagecast_scheduler.core.request import NEVER, Request, Sequence, Status
from pagecast_scheduler.core.rows import Index
from pagecast_scheduler.core.state import InFlight, State
from pagecast_wire.checksum import table_checksum
from pagecast_wire.intake import Phase
from pagecast_wire.plan import StepPlan
from pagecast_wire.sampling import FinishReason


def make_plan(s: State, now: int) -> StepPlan | None:
    """The next plan, or None if no row has anything to do."""
    draft = PlanDraft()
    _plan_decodes(s, draft, now)
    budget = s.config.max_num_batched_tokens - len(draft.stepping)
    if s.rows.prefilling:
        budget = _plan_chunks(s, draft, budget, now)
    if len(s.queue) and budget > 0 and s.rows.num_free:
        _admit_waiting(s, draft, budget, now)
    if draft.is_empty:
        return None
    return _commit(s, draft, now)


def _plan_decodes(s: State, draft: PlanDraft, now: int) -> None:
    """Every decoding row gets the block its next token needs; too few blocks cost somebody its place."""
    rows = s.rows
    draft.num_steps = _num_steps(s, now)
    if draft.num_steps > 1 and not _grow_for_steps(s, draft):
        draft.num_steps = 1
    if draft.num_steps == 1:
        short = rows.short_of_blocks()
        if len(short) > s.kv.pool.num_free:
            _grow_scarce(s, draft, short, now)
        elif len(short):
            _grow(s, draft, short)
    draft.stepping = s.rows.stepping_rows()
    if draft.stalled:
        draft.stepping = np.setdiff1d(draft.stepping, draft.stalled)


def _num_steps(s: State, now: int) -> int:
    if s.config.max_steps_per_plan == 1 or len(s.queue) or s.rows.prefilling or s.suspects:
        return 1
    stepping = s.rows.stepping_rows()
    if not len(stepping):
        return 1
    most = int((s.rows.max_tokens[stepping] - s.rows.num_planned[stepping]).max())
    limit = s.timers.next()
    return policy.steps_in_plan(s.config.max_steps_per_plan, most, None if limit is None else limit - now, s.estimates.step_us)


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
    by_urgency = sorted(short.tolist(), key=lambda row: _rank(s, row, now))
    for row in by_urgency:
        if s.rows.owners[row] is None:
            continue  # preempted for a more urgent one
        if not make_room(s, draft, row, now):
            continue
        _grow(s, draft, np.array([row], np.int64))
        draft.touched.add(row)


def make_room(s: State, draft: PlanDraft, row: int, now: int) -> bool:
    """At least one free block for `row`, by preemption if need be. False: the row stalls in this step, or was itself preempted."""
    while not s.kv.pool.num_free:
        if s.free_detached():
            continue
        candidates = [_running(s, seq, draft, now) for seq in s.rows.running()]
        requester = next(c for c in candidates if c.row == row)
        victim = policy.choose_victim(candidates, requester)
        if victim is None and policy.must_stall(candidates, requester):
            if s.rows.stepping[row]:
                draft.stalled.append(row)
            return False
        chosen = requester if victim is None else victim
        draft.drop_row(chosen.row)
        if chosen.row in draft.stalled:
            draft.stalled.remove(chosen.row)
        s.preempt(s.rows.owner(chosen.row), now)
        if victim is None:
            return False
    return True


def _running(s: State, seq: Sequence, draft: PlanDraft, now: int) -> policy.Running:
    request = seq.request
    return policy.Running(
        row=seq.row, urgency=_urgency(s, request, now), order=request.order + seq.index, lost_tokens=s.rows.computed(seq.row),
        paused=request.paused, protected=seq.row in draft.touched,
    )  # fmt: skip


def _urgency(s: State, request: Request, now: int) -> int:
    return policy.urgency(request.priority, now - request.arrival, s.config.ageing_us)


def _rank(s: State, row: int, now: int) -> tuple[int, int]:
    seq = s.rows.owner(row)
    return _urgency(s, seq.request, now), seq.request.order + seq.index


def _plan_chunks(s: State, draft: PlanDraft, budget: int, now: int) -> int:
    """Rows in the middle of their prompt go on, the most urgent first. Returns the budget left."""
    for row in sorted(s.rows.prefilling, key=lambda row: _rank(s, row, now)):
        if budget <= 0:
            break
        if s.rows.owners[row] is None or s.rows.paused[row]:
            continue
        start, have = int(s.rows.num_computed[row]), int(s.kv.table.num_blocks[row])
        remaining = int(s.rows.num_tokens[row]) - start
        size = s.config.block_size
        length = policy.chunk_length(remaining, budget, (have + s.kv.pool.num_free) * size - start)
        if not length:
            # While others decode they will end and leave blocks; only a batch that would stand still takes them by force.
            if len(draft.stepping) or not make_room(s, draft, row, now):
                continue
            length = policy.chunk_length(remaining, budget, (have + s.kv.pool.num_free) * size - start)
        missing = s.kv.blocks_for(start + length) - have
        if missing > 0:
            draft.grow(np.full(missing, row, np.int64), s.kv.grow(row, missing))
        _add_chunk(s, draft, row, start, length, now)
        budget -= length
    return budget


def _add_chunk(s: State, draft: PlanDraft, row: int, start: int, length: int, now: int) -> None:
    """The row computes [start, start + length); blocks that this fills become findable, provisionally."""
    seq, end, size = s.rows.owner(row), start + length, s.config.block_size
    draft.chunks.append((row, start, length))
    draft.num_prefill_tokens += length
    draft.touched.add(row)
    s.rows.num_computed[row] = end
    if not seq.request.submit.bypass_prefix_cache:
        s.kv.publish(s.kv.table.row(row), seq.chain, seq.tokens, start // size, end // size, s.step + 1)
    s.tenants.served[seq.request.tenant] += length
    s.totals.prompt_tokens += length
    if end == int(s.rows.num_tokens[row]):
        draft.finishing.append(row)
        s.release_held(seq.request, now)
    elif seq.request.num_open == 1:
        s.report(seq, Phase.PREFILLING)


def _admit_waiting(s: State, draft: PlanDraft, budget: int, now: int) -> None:
    """Fill free rows from the queue. A head that does not fit may be passed by a bounded number of smaller ones."""
    blocked: list[Sequence] = []
    while budget > 0 and s.rows.num_free and len(blocked) < s.config.max_pass_candidates:
        seq = _next_alone(s) if s.suspects else s.queue.take(now)
        if seq is None:
            break
        if _hopeless(s, seq, now):
            s.finish(seq, FinishReason.DEADLINE_EXCEEDED, now)
            continue
        hits = _hits(s, seq)
        if hits is None:
            blocked.append(seq)
            if s.suspects or seq.passes >= s.config.max_head_passes:
                break
            continue
        budget -= _admit(s, draft, seq, hits, budget, now)
        for passed in blocked:
            passed.passes += 1
        if any(passed.passes >= s.config.max_head_passes for passed in blocked):
            break
    for seq in blocked:
        if not s.suspects:
            s.queue.put_back(seq)


def _next_alone(s: State) -> Sequence | None:
    """While there are suspects of having crashed the workers, one of them at a time runs, and nobody else."""
    if s.alone is None and not s.rows.num_active and not s.detached:
        s.alone = next((request for request in s.suspects.values() if not request.paused), None)
    if s.alone is None:
        return None
    return next((seq for seq in s.alone.sequences if seq.queued), None)


def _hopeless(s: State, seq: Sequence, now: int) -> bool:
    request = seq.request
    if request.deadline >= NEVER:
        return False
    left = least_output(request.submit) - seq.num_output_tokens
    least = s.estimates.finish_us(seq.num_tokens, left, s.config.max_num_batched_tokens)
    return policy.cannot_finish(least, request.deadline - now, s.config.estimate_percent)


def _hits(s: State, seq: Sequence) -> Blocks | None:
    """Shared blocks for a sequence that fits now; None if it does not fit."""
    cache, pool, rows = s.kv.cache, s.kv.pool, s.rows
    reserved = sum(
        max(0, s.kv.blocks_for(int(rows.num_tokens[row])) - int(s.kv.table.num_blocks[row])) for row in rows.prefilling
    )  # fmt: skip
    free, active = pool.num_free, rows.num_active
    lacking, changes = seq.blocked
    if changes == cache.num_changes and not policy.admission_fits(lacking, free, reserved, active):
        return None
    hits = _shared(s, seq)
    needed = s.kv.blocks_for(seq.num_tokens + 1) - len(hits) + s.kv.num_revived(hits)
    if policy.admission_fits(needed, free, reserved, active):
        return hits
    seq.blocked = (needed, cache.num_changes)
    return None


def _shared(s: State, seq: Sequence) -> Blocks:
    """Blocks that hold a prefix of the sequence already: from the cache, or from a sibling where the cache is not to be used."""
    request = seq.request
    if s.kv.caching and not request.submit.bypass_prefix_cache:
        return s.kv.lookup(seq.chain, seq.tokens, seq.num_tokens)
    full = (request.num_prompt_tokens - 1) // s.config.block_size
    for sibling in request.sequences:
        if sibling.row >= 0 and s.rows.decoding[sibling.row]:
            return s.kv.table.row(sibling.row)[:full]
    return np.zeros(0, np.int64)


def _admit(s: State, draft: PlanDraft, seq: Sequence, hits: Blocks, budget: int, now: int) -> int:
    """WAITING -> RUNNING, with a first chunk. Returns the chunk's length."""
    request = seq.request
    s.queue.remove(seq)
    s.start(request)
    computed = len(hits) * s.config.block_size
    length = min(seq.num_tokens - computed, budget)
    row = s.rows.open(seq, computed)
    s.kv.open_row(row, hits)
    s.kv.grow(row, s.kv.blocks_for(computed + length) - len(hits))
    seq.status = Status.RUNNING
    seq.hit_tokens = computed
    seq.passes = 0
    seq.num_recomputed_tokens -= computed if seq.resumed else 0
    if seq.admitted_at < 0:
        seq.admitted_at, seq.num_cached_tokens = now, computed
    s.totals.prefix_tokens_asked += seq.num_tokens
    s.totals.prefix_tokens_hit += computed
    draft.admissions.append(admission(seq, s.kv.table.row(row), computed))
    _add_chunk(s, draft, row, computed, length, now)
    s.report(seq, Phase.PREFILLING)
    return length


def _commit(s: State, draft: PlanDraft, now: int) -> StepPlan:
    """The draft becomes the next step: lengths advance, the plan is in flight, rows at their limit are let go."""
    rows, stepping = s.rows, draft.stepping
    s.step += 1
    checksum = _checksum(s) if s.config.table_checksums else 0
    limits: Index | None = None
    if draft.num_steps > 1:
        limits = np.minimum(draft.num_steps, rows.max_tokens[stepping] - rows.num_planned[stepping])
        rows.num_planned[stepping] += limits
    elif draft.stalled:
        rows.num_planned[stepping] += 1
    else:
        rows.advance()
    plan = draft.build(s.epoch, s.step, s.released, rows.sitting_out() if rows.num_paused else stepping[:0], checksum)
    s.released = []
    for row in draft.finishing:
        rows.start_decoding(row, int(s.kv.table.num_blocks[row]) * s.config.block_size)
    # Who samples now decodes in the next step, unless a row stalls: one cohort serves both.
    cohort = s.cohort() if not draft.stalled else Cohort(rows, np.setdiff1d(s.rows.stepping_rows(), draft.stalled))
    entering = [(row, int(rows.generation[row])) for row in draft.finishing]
    s.in_flight.append(InFlight(s.step, draft.num_steps, cohort, rows.num_freed, now, entering, limits, draft.num_prefill_tokens))
    _let_go(s)
    return plan


def _let_go(s: State) -> None:
    """Rows whose last token is planned leave in the next plan. Looked for only in steps in which there can be one."""
    version, quiet_until = s.limit_check
    if version == s.rows.version and s.step < quiet_until:
        return
    for row in s.rows.at_limit().tolist():
        s.detach(row)
    s.limit_check = (s.rows.version, 0 if s.config.max_steps_per_plan > 1 else s.step + s.rows.steps_to_limit())


def _checksum(s: State) -> int:
    """Over the tables as this plan leaves them; 0 while a plan of several steps is in flight, whose early stops are not known here."""
    if any(record.num_steps > 1 for record in s.in_flight):
        return 0
    table = s.kv.table
    rows = [seq.row for seq in s.rows.running()]
    return table_checksum((row, int(s.rows.num_planned[row]), table.blocks[row, : table.num_blocks[row]]) for row in rows)
