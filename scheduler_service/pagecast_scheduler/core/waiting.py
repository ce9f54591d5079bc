"""Why each open request is not running: read from the state, by the same rules that admission follows. Changes nothing."""

from dataclasses import dataclass

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.pacing import paced_tokens
from pagecast_scheduler.core.request import Request, Sequence, Status
from pagecast_scheduler.core.state import State
from pagecast_wire.control import WaitCause


@dataclass(frozen=True, slots=True)
class Wait:
    """cause: what stands in the way of the request's first sequence that does not run. ahead: sequences before it in the queue.
    blocks_needed: free blocks to enter, prefix hits left out where they are known; blocks_free: that it could have now."""

    cause: WaitCause
    ahead: int = 0
    blocks_needed: int = 0
    blocks_free: int = 0
    lane: int = 0


def explain(s: State, gathers: bool, now: int) -> dict[int, Wait]:
    """By key, every open request. gathers: the next plan is held back for more to come. Costs a sort of the queue."""
    positions = {id(seq): at for at, seq in enumerate(s.queue.waiting())}
    return {key: _explain(s, request, positions, gathers, now) for key, request in s.requests.items()}


def _explain(s: State, request: Request, positions: dict[int, int], gathers: bool, now: int) -> Wait:
    seq = next((seq for seq in request.sequences if seq.status is Status.WAITING), None)
    if request.paused:
        return Wait(WaitCause.PAUSED)
    if seq is None:
        return Wait(WaitCause.NONE)
    needed, free = _needed(s, seq), s.kv.pool.num_free
    ahead = positions.get(id(seq), 0)
    return Wait(_cause(s, seq, ahead, needed, free, gathers, now), ahead, needed, free, seq.lane)


def _needed(s: State, seq: Sequence) -> int:
    lacking, changes = seq.blocked
    return lacking if changes == s.kv.cache.num_changes else s.kv.blocks_for(seq.num_tokens + 1)


def _cause(s: State, seq: Sequence, ahead: int, needed: int, free: int, gathers: bool, now: int) -> WaitCause:
    rows = s.rows
    if seq in seq.request.held:
        return WaitCause.SIBLING
    if s.isolating() and s.alone is not seq.request:
        return WaitCause.ISOLATION
    if gathers:
        return WaitCause.BATCH_DELAY
    if ahead:
        return WaitCause.BEHIND
    if not rows.num_free:
        return WaitCause.ROWS
    lengths = {row: int(rows.num_tokens[row]) for row in rows.prefilling}
    reserved = sum(max(0, s.kv.blocks_for(length) - int(s.kv.table.num_blocks[row])) for row, length in lengths.items())
    if not policy.admission_fits(needed, free, reserved, rows.num_active):
        return WaitCause.BLOCKS
    decodes = rows.stepping_rows()
    begun = sum(length - int(rows.num_computed[row]) for row, length in lengths.items())
    if len(decodes) + begun >= s.config.max_num_batched_tokens:
        return WaitCause.STEP_FULL
    paced = paced_tokens(s, decodes, now)
    return WaitCause.NEXT if paced is None or begun < paced else WaitCause.PACED
