"""Too few free blocks: who gives up its place, and for whom."""

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.request import Request, Sequence
from pagecast_scheduler.core.state import State


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


def take_from_paused(s: State, now: int) -> bool:
    """For one who waits: the paused sequence with the least to lose gives up its row and its blocks, which its client keeps it from
    using, however urgent it was. False: none has any."""
    if not s.rows.num_paused:
        return False
    paused = [seq for seq in s.rows.running() if seq.request.paused]
    s.preempt(min(paused, key=lambda seq: (s.rows.computed(seq.row), -seq.request.order - seq.index)), now)
    return True


def _running(s: State, seq: Sequence, draft: PlanDraft, now: int) -> policy.Running:
    request = seq.request
    return policy.Running(
        row=seq.row, urgency=_urgency(s, request, now), order=request.order + seq.index, lost_tokens=s.rows.computed(seq.row),
        paused=request.paused, protected=seq.row in draft.touched,
    )  # fmt: skip


def _urgency(s: State, request: Request, now: int) -> int:
    return policy.urgency(request.priority, now - request.arrival, s.config.ageing_us)


def rank(s: State, row: int, now: int) -> tuple[int, int]:
    seq = s.rows.owner(row)
    return _urgency(s, seq.request, now), seq.request.order + seq.index
