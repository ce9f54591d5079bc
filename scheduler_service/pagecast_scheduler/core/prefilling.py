"""Prefill: chunks of rows in the middle of their known tokens, and admissions from the queue, which begin with one."""

import numpy as np

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.block_pool import Blocks
from pagecast_scheduler.core.intake import least_output
from pagecast_scheduler.core.plan_builder import PlanDraft, admission
from pagecast_scheduler.core.request import NEVER, Sequence, Status
from pagecast_scheduler.core.scarcity import make_room, rank, take_from_paused
from pagecast_scheduler.core.state import State
from pagecast_wire.intake import Phase
from pagecast_wire.sampling import FinishReason


def plan_chunks(s: State, draft: PlanDraft, budget: int, now: int) -> int:
    """Rows in the middle of their prompt go on, the most urgent first. Returns the budget left."""
    for row in sorted(s.rows.prefilling, key=lambda row: rank(s, row, now)):
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
    if seq.index == 0 and seq.request.tells_prompt:
        draft.telling.append(row)
    seq.num_recomputed_tokens += max(0, min(end, seq.num_computed_before) - start)
    if not seq.request.submit.bypass_prefix_cache:
        s.kv.publish(s.kv.table.row(row), seq.chain, seq.tokens, start // size, end // size, s.step + 1)
    s.tenants.served[seq.request.tenant] += length
    s.totals.prompt_tokens += length
    if end == int(s.rows.num_tokens[row]):
        draft.finishing.append(row)
        s.release_held(seq.request, now)
    else:
        s.report(seq, Phase.PREFILLING)


def admit_waiting(s: State, draft: PlanDraft, budget: int, now: int) -> None:
    """Fill free rows from the queue, then those of paused sequences. A head that does not fit may be passed by a bounded number of
    smaller ones."""
    blocked: list[Sequence] = []
    isolating = s.isolating()
    reserved = _reserved(s)
    most = s.config.max_num_seqs if s.in_flight or s.rows.num_active else policy.FIRST_ADMISSIONS
    while budget > 0 and len(s.queue) > len(blocked) and len(blocked) < s.config.max_pass_candidates and len(draft.admissions) < most:
        if not s.rows.num_free:
            if not (len(s.queue) and take_from_paused(s, now)):
                break
            reserved = _reserved(s)
        seq = _next_alone(s) if isolating else s.queue.take(now)
        if seq is None:
            break
        if _hopeless(s, seq, now):
            s.finish(seq, FinishReason.DEADLINE_EXCEEDED, now)
            continue
        hits = _hits(s, seq, reserved)
        while hits is None and take_from_paused(s, now):
            reserved = _reserved(s)
            hits = _hits(s, seq, reserved)
        if hits is None:
            blocked.append(seq)
            if isolating or seq.passes >= s.config.max_head_passes:
                break
            continue
        budget -= _admit(s, draft, seq, hits, budget, now)
        reserved += _still_needed(s, seq.row)
        for passed in blocked:
            passed.passes += 1
        if any(passed.passes >= s.config.max_head_passes for passed in blocked):
            break
    for seq in blocked:
        if not isolating:
            s.queue.put_back(seq)


def _next_alone(s: State) -> Sequence | None:
    """While there are suspects of having crashed the workers, one of them at a time runs, and nobody else."""
    if s.alone is None and not s.in_flight and not s.rows.num_active and not s.detached:
        s.alone = next((request for request in s.suspects.values() if not request.paused), None)
    if s.alone is None:
        return None
    return next((seq for seq in s.alone.sequences if seq.queued), None)


def _hopeless(s: State, seq: Sequence, now: int) -> bool:
    request = seq.request
    if request.started or request.deadline >= NEVER or request.budget_end < request.deadline:
        return False  # what has begun goes on to its deadline: its output so far is of use
    left = least_output(request.submit) - seq.num_output_tokens
    least = s.estimates.finish_us(seq.num_tokens, left, s.config.max_num_batched_tokens)
    return policy.cannot_finish(least, request.deadline - now, s.config.estimate_percent)


def _reserved(s: State) -> int:
    """Blocks that running prefills still need."""
    return sum(_still_needed(s, row) for row in s.rows.prefilling)


def _still_needed(s: State, row: int) -> int:
    return max(0, s.kv.blocks_for(int(s.rows.num_tokens[row])) - int(s.kv.table.num_blocks[row]))


def _hits(s: State, seq: Sequence, reserved: int) -> Blocks | None:
    """Shared blocks for a sequence that fits now, beside those that running prefills still need; None if it does not fit."""
    cache, pool = s.kv.cache, s.kv.pool
    free, active = pool.num_free, s.rows.num_active
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
    if seq.index == 0 and request.tells_prompt:
        return np.zeros(0, np.int64)  # it has to go over the whole prompt itself
    full = (request.num_prompt_tokens - 1) // s.config.block_size
    for sibling in request.sequences:
        if sibling.row >= 0 and s.rows.computed(sibling.row) >= full * s.config.block_size:
            return s.kv.table.row(sibling.row)[:full]
    return np.zeros(0, np.int64)


def _admit(s: State, draft: PlanDraft, seq: Sequence, hits: Blocks, budget: int, now: int) -> int:
    """WAITING -> RUNNING, with a first chunk. Returns the chunk's length."""
    request = seq.request
    s.queue.admit(seq)
    s.start(request)
    computed = len(hits) * s.config.block_size
    length = min(seq.num_tokens - computed, budget)
    row = s.rows.open(seq, computed)
    s.kv.open_row(row, hits)
    s.kv.grow(row, s.kv.blocks_for(computed + length) - len(hits))
    seq.status = Status.RUNNING
    seq.hit_tokens = computed
    seq.passes = 0
    if seq.admitted_at < 0:
        seq.admitted_at, seq.num_cached_tokens = now, computed
    if s.kv.caching and not request.submit.bypass_prefix_cache:
        s.totals.prefix_tokens_asked += seq.num_tokens
    s.totals.prefix_tokens_hit += computed
    draft.admissions.append(admission(seq, s.kv.table.row(row), computed))
    _add_chunk(s, draft, row, computed, length, now)
    s.report(seq, Phase.PREFILLING)
    return length
