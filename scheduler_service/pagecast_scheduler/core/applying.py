"""Applying one step's result: tokens join their sequences, and what ended ends."""

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core import forced
from pagecast_scheduler.core.logprobs import Logprobs, emit_logprobs, read_logprobs, tell_prompts, token_logprobs
from pagecast_scheduler.core.outputs import Cohort
from pagecast_scheduler.core.request import Sequence
from pagecast_scheduler.core.rows import Index
from pagecast_scheduler.core.state import Detached, InFlight, ResultError, State
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import Phase
from pagecast_wire.result import FLAG_BAD, FLAG_DEAD, FLAG_IDLE, FLAG_LARGE, FLAG_STOP, StepResult
from pagecast_wire.sampling import ConstraintFault, FinishReason

Tokens = NDArray[np.uint32]
Flags = NDArray[np.uint8]
ONE = np.uint32(1)
_NONE = np.zeros(0, np.int64)


def apply_result(s: State, result: StepResult, now: int) -> None:
    """The oldest plan in flight is done. Results of another epoch, and duplicates, change nothing. Raises ResultError."""
    if result.epoch != s.epoch or not s.in_flight or result.step != s.in_flight[0].step:
        return
    record = s.in_flight[0]
    tokens, width = view_u32(result.tokens), len(record.cohort.rows)
    total = record.num_steps * width
    if len(tokens) != total or len(result.flags) != total:
        raise ResultError(f"step {result.step}: {len(tokens)} tokens and {len(result.flags)} flags for {total} samples")
    s.in_flight.popleft()
    s.applied_step = result.step
    s.outputs.num_steps += record.num_steps
    logprobs = read_logprobs(result) if result.logprob_rows else {}
    if record.telling:
        tell_prompts(s, record, result)
    if record.entering:
        _first_tokens(s, record, now)
    if record.jumps:
        forced.land(s, record, result)
    plain = record.num_steps == 1 and not logprobs and result.flags == bytes(total)
    if plain and record.num_freed == s.rows.num_freed:
        _append(s, record.cohort, tokens)  # the steady state: nobody came, went or ended
    else:
        flags = np.frombuffer(result.flags, np.uint8)
        for k in range(record.num_steps):
            part = slice(k * width, (k + 1) * width)
            _apply_one(s, record, k, tokens[part], flags[part], {at - k * width: v for at, v in logprobs.items()}, now)
    if result.forced_at:
        forced.note(s, record, result)
    s.kv.applied(result.step)
    s.estimates.applied(record.planned_at, record.num_steps, len(tokens) + record.num_computed_tokens, now)
    if s.alone is not None:
        _clear_suspect(s, now)


def _apply_one(
    s: State, record: InFlight, k: int, tokens: Tokens, flags: Flags, logprobs: Logprobs, now: int
) -> None:
    """One of the plan's steps, in which rows may have come, gone or ended. k: which of the num_steps."""
    cohort, rows = record.cohort, s.rows
    live = rows.generation[cohort.rows] == cohort.generations
    usable = flags & (FLAG_IDLE | FLAG_BAD | FLAG_DEAD) == 0
    if record.limits is not None:
        usable &= record.limits > k
    if not live.all():
        _apply_detached(s, cohort, np.flatnonzero(~live & usable), tokens, flags, logprobs, now)
    if logprobs:
        emit_logprobs(s, cohort, live & usable, logprobs)
    chosen = live & usable
    whole = cohort
    if not chosen.all():
        cohort, tokens = _narrow(s, cohort, chosen), tokens[chosen]
    _append(s, cohort, tokens)
    if flags.any():
        _apply_flags(s, record, whole.rows[chosen & (flags & FLAG_STOP != 0)], flags, now)


def _apply_flags(s: State, record: InFlight, stopped: Index, flags: Flags, now: int) -> None:
    """What the workers say of single rows, once their tokens are appended. stopped: rows whose token ends them."""
    rows, bad = s.rows, np.flatnonzero(flags & FLAG_BAD)
    for row in stopped.tolist():
        seq = rows.owner(row)
        s.finish(seq, FinishReason.STOP, now, stop_token_id=int(rows.tokens[row, rows.num_tokens[row] - 1]))
    if len(bad):
        _apply_bad(s, record, bad, now)
    for at in np.flatnonzero(flags & FLAG_DEAD).tolist():
        _apply_dead(s, record, at, int(flags[at]), now)


def _apply_dead(s: State, record: InFlight, at: int, flags: int, now: int) -> None:
    """A row whose rules left no token: its sequence ends without one."""
    seq = s.holder(int(record.cohort.rows[at]), int(record.cohort.generations[at]))
    if seq is not None and not flags & (FLAG_IDLE | FLAG_BAD):
        fault = ConstraintFault.TOO_LARGE if flags & FLAG_LARGE else ConstraintFault.NO_TOKEN
        s.finish(seq, FinishReason.CONSTRAINT_FAILED, now, constraint_fault=fault)


def _narrow(s: State, cohort: Cohort, chosen: NDArray[np.bool_]) -> Cohort:
    """The cohort of a part of the rows: the steady one where it is the same, since it exists already."""
    rows = cohort.rows[chosen]
    if s.steady is not None and s.steady[0] == s.rows.version and np.array_equal(s.steady[1].rows, rows):
        return s.steady[1]
    return Cohort(s.rows, rows)


def _append(s: State, cohort: Cohort, tokens: Tokens) -> None:
    """One new token for every row of the cohort."""
    rows, index = s.rows, cohort.rows
    if not len(index):
        return
    at, offsets = rows.num_tokens[cohort.span], rows.num_output[cohort.span]
    rows.flat_tokens[cohort.flat_starts + at] = tokens
    s.outputs.add_step(cohort, offsets, tokens)
    if isinstance(cohort.span, slice):
        np.add(at, cohort.ones, out=at)
        np.add(offsets, ONE, out=offsets)
    else:
        rows.num_tokens[index] = at + 1
        rows.num_output[index] = offsets + ONE
    s.tenants.serve(cohort.tenants, cohort.tenant_rows)
    s.totals.output_tokens += len(index)


def _first_tokens(s: State, record: InFlight, now: int) -> None:
    for row, generation in record.entering:
        seq = s.holder(row, generation)
        if seq is None:
            continue
        if seq.first_token_at < 0:
            seq.first_token_at = now
        if seq.row >= 0 and not seq.request.paused:
            s.report(seq, Phase.DECODING)


def _apply_detached(
    s: State, cohort: Cohort, positions: Index, tokens: Tokens, flags: Flags, logprobs: Logprobs, now: int
) -> None:
    """Rows that are no longer who they were: last results of sequences that wait for them; anything else is stale and ignored."""
    for at in positions.tolist():
        entry = s.detached.get((int(cohort.rows[at]), int(cohort.generations[at])))
        if entry is None:
            continue
        seq = entry.seq
        if at in logprobs:
            s.outputs.add_logprobs(seq.request.slot, token_logprobs(seq, seq.num_output_tokens, logprobs[at]))
        _append_detached(s, entry, int(tokens[at]))
        if flags[at] & FLAG_STOP:
            s.finish(seq, FinishReason.STOP, now, stop_token_id=int(tokens[at]))
        elif entry.num_pending == 0:
            s.finish(seq, FinishReason.LENGTH, now)


def _append_detached(s: State, entry: Detached, token: int) -> None:
    seq = entry.seq
    s.outputs.add_token(seq.request.slot, seq.request.key, seq.index, seq.num_output_tokens, token)
    seq.tokens[seq.num_tokens] = token
    seq.num_tokens += 1
    entry.num_pending -= 1
    s.tenants.served[seq.request.tenant] += 1
    s.totals.output_tokens += 1


def _apply_bad(s: State, record: InFlight, positions: Index, now: int) -> None:
    """Rows whose logits were not numbers. One that shares another's blocks may be bad for that alone: so sources end first, and whoever
    shared with them starts over instead of ending."""
    cohort, bad, is_stale = record.cohort, [], False
    for at in positions.tolist():
        row, generation = int(cohort.rows[at]), int(cohort.generations[at])
        entry = s.detached.get((row, generation))
        if s.rows.generation[row] == generation:
            bad.append(s.rows.owner(row))
        elif entry is not None:
            bad.append(entry.seq)
        else:
            is_stale = True
    if is_stale:  # whose it was is forgotten, so everything that its step filled is suspect
        suspect = np.array(s.kv.cache.planned_in(record.step), np.int64)
        s.kv.forget(suspect)
        _start_over(s, suspect, now)
    for seq in sorted(bad, key=lambda seq: _shares_with(s, seq, bad)):
        if seq.row >= 0 or seq.detached is not None:  # not told to start over
            _end_bad(s, seq, now)


def _blocks_of(s: State, seq: Sequence) -> tuple[Index, Index]:
    """(shared when it was admitted, its own) blocks of a sequence in a row or detached from one, those that it gave back before its last
    results included; nothing for any other."""
    if seq.detached is not None:
        entry = s.detached[seq.detached]
        blocks = entry.blocks if len(entry.blocks) else entry.given_back
    else:
        blocks = s.kv.table.row(seq.row) if seq.row >= 0 else _NONE
    split = seq.hit_tokens // s.config.block_size
    return blocks[:split], blocks[split:]


def _shares_with(s: State, seq: Sequence, others: list[Sequence]) -> bool:
    """Whether it was admitted onto blocks that one of the others computed."""
    shared, _ = _blocks_of(s, seq)
    return any(bool(np.isin(shared, _blocks_of(s, other)[1]).any()) for other in others if other is not seq)


def _end_bad(s: State, seq: Sequence, now: int) -> None:
    """The row's logits were not numbers: the sequence ends, and nothing that it computed itself may be found again."""
    _, own = _blocks_of(s, seq)
    s.kv.forget(own)
    s.finish(seq, FinishReason.NUMERIC_FAULT, now)
    _start_over(s, own, now)


def _start_over(s: State, bad: Index, now: int) -> None:
    """Whoever was admitted onto one of the bad blocks computes all from there on again. Who merely has one by now took it afresh."""
    for seq in s.rows.running():
        shared, own = _blocks_of(s, seq)
        first = np.flatnonzero(np.isin(shared, bad))
        if len(first):
            s.kv.forget(np.concatenate([shared[first[0] :], own]))
            s.preempt(seq, now, keep_content=False)
    for entry in list(s.detached.values()):
        if np.isin(_blocks_of(s, entry.seq)[0], bad).any():
            s.reattach(entry.seq, now)


def _clear_suspect(s: State, now: int) -> None:
    """A request that ran alone past the point of the crash did not cause it."""
    request = s.alone
    assert request is not None
    held = [int(s.rows.num_tokens[seq.row]) if seq.row >= 0 else seq.num_tokens for seq in request.sequences]
    if max(held) > request.crash_tokens:
        request.num_crashes = 0
        del s.suspects[request.key]
        s.alone = None
        if s.isolating():  # the next suspect must not wait for this one's end
            for seq in request.sequences:
                if seq.row >= 0:
                    s.preempt(seq, now)
