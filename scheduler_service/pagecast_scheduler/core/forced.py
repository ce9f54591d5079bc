"""Forced tokens: where a constraint leaves no choice, a row computes many tokens in one step, as it computes a prompt.

A worker says which tokens must follow one that it drew. They are planned as soon as that saves steps, and join the sequence with the
result of their step, so that a step that fails takes them with it.
"""

import numpy as np

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.plan_builder import Jump, PlanDraft
from pagecast_scheduler.core.rows import ForcedRun
from pagecast_scheduler.core.state import InFlight, ResultError, State
from pagecast_wire.codec import view_u32
from pagecast_wire.result import FLAG_BAD, StepResult


def plan_jumps(s: State, draft: PlanDraft, budget: int) -> int:
    """Decoding rows whose next tokens are known take them in this step, as far as budget and free blocks go. Returns the budget left."""
    rows, size = s.rows, s.config.block_size
    for row, run in list(rows.forced.items()):
        planned = int(rows.num_planned[row])
        ahead = min(run.end, int(rows.max_tokens[row]) - 1) - planned  # the last token of all is always drawn
        if ahead < policy.FEWEST_JUMPED:
            del rows.forced[row]
            continue
        if not rows.stepping[row] or row in draft.stalled:
            continue
        capacity = int(rows.capacity[row])
        count = min(ahead, budget, capacity + s.kv.pool.num_free * size - planned)
        if count < policy.FEWEST_JUMPED:
            continue
        missing = -(-(planned + count - capacity) // size)
        if missing > 0:
            draft.grow(np.full(missing, row, np.int64), s.kv.grow(row, missing))
            rows.capacity[row] += missing * size
        newest = run.tokens[planned - 1 - run.start] if planned > run.start else rows.tokens[row, planned - 1]
        forced = run.tokens[planned - run.start : planned - run.start + count]
        draft.jumps.append(Jump(row, int(rows.generation[row]), int(newest), forced))
        draft.touched.add(row)
        budget -= count
    draft.jumps.sort(key=lambda jump: jump.row)
    return budget


def commit(s: State, draft: PlanDraft) -> None:
    """The draft becomes a plan: the rows that jump have so many more tokens planned."""
    for jump in draft.jumps:
        s.rows.num_planned[jump.row] += len(jump.tokens)
    s.limit_check = (-1, 0)  # a row may be at its limit sooner than it was counted


def land(s: State, record: InFlight, result: StepResult) -> None:
    """The forced tokens of a step that was computed join their sequences, before what was drawn after them does. Raises ResultError."""
    for jump in record.jumps:
        at = int(np.searchsorted(record.cohort.rows, jump.row))
        seq = s.holder(jump.row, jump.generation)
        if seq is None or result.flags[at] & FLAG_BAD:
            continue
        known, request, count = s.rows.tokens[jump.row] if seq.row >= 0 else seq.tokens, seq.request, len(jump.tokens)
        held = int(s.rows.num_tokens[seq.row]) if seq.row >= 0 else seq.num_tokens
        if int(known[held - 1]) != jump.newest:
            raise ResultError(f"step {result.step}: row {jump.row} drew {known[held - 1]} where {jump.newest} was forced")
        known[held : held + count] = jump.tokens
        s.outputs.add_forced(request.slot, request.key, seq.index, held - request.num_prompt_tokens, jump.tokens)
        if seq.row >= 0:
            s.rows.num_tokens[seq.row] += count
            s.rows.num_output[seq.row] += np.uint32(count)
        else:
            seq.num_tokens += count
            s.detached[jump.row, jump.generation].num_pending -= count
        s.tenants.served[request.tenant] += count
        s.totals.output_tokens += count
        s.totals.forced_tokens += count


def note(s: State, record: InFlight, result: StepResult) -> None:
    """What must follow the tokens that were drawn, for rows that are still who they were. Raises ResultError."""
    places, counts = view_u32(result.forced_at).tolist(), view_u32(result.forced_counts).tolist()
    tokens, rows, cohort = view_u32(result.forced_tokens), s.rows, record.cohort
    if len(places) != len(counts) or sum(counts) != len(tokens) or max(places) >= len(cohort.rows) or record.num_steps > 1:
        raise ResultError(f"step {result.step}: {len(tokens)} forced tokens in {len(places)} runs for {len(cohort.rows)} samples")
    end = 0
    for at, count in zip(places, counts, strict=True):
        end += count
        row = int(cohort.rows[at])
        if count and rows.generation[row] == cohort.generations[at]:
            rows.forced[row] = ForcedRun(int(rows.num_tokens[row]), tokens[end - count : end])
