"""Prefill of requests in no hurry is spread over the steps of those that run. See `backlog`."""

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.rows import Index
from pagecast_scheduler.core.state import State


def pace_budget(s: State, draft: PlanDraft, budget: int, now: int) -> int:
    """The tokens left for prefill in this step, where nobody who waits or prefills is in a hurry; else the budget as it is."""
    paced = None if draft.stalled else paced_tokens(s, draft.stepping, now)
    if paced is None:
        return budget
    s.queue.paced_at = now
    return min(budget, paced)


def paced_tokens(s: State, decodes: Index, now: int) -> int | None:
    """Prefill tokens of the next step beside the rows that decode in it. None: as many as there are, for somebody is in a hurry, or more
    wait than there are rows, or blocks, and these would be busy to the end, so that none may stand idle."""
    rows, backlog = s.rows, s.queue.backlog
    if s.queue.is_hurried(now) or s.isolating():
        return None
    begun, begun_output, outputs = 0, 0, backlog.output_tokens()
    for row in rows.prefilling:
        if rows.owner(row).request.is_hurried(now):
            return None
        begun += int(rows.num_tokens[row] - rows.num_computed[row])
        output = int(rows.max_tokens[row] - rows.num_tokens[row])
        begun_output, outputs = max(begun_output, output), outputs + output
    left = rows.max_tokens[decodes] - rows.num_planned[decodes]
    last = max(int(left.max()) if len(decodes) else 0, begun_output, backlog.longest())
    at_once = _num_at_once(s)
    if len(s.queue) > min(rows.num_free, at_once - rows.num_active) and policy.rows_decide(outputs + int(left.sum()), last, at_once):
        return None
    needed, slack = backlog.tokens_a_step(last, begun, begun_output)
    steps = s.step + 1 - s.prefilled_in
    tokens = policy.paced_prefill(needed, steps, len(decodes), slack, bool(begun))
    if not tokens and steps >= policy.MOST_STEPS_LATE and not _has_room(s):
        tokens = policy.paced_prefill(needed, steps, len(decodes), 0)
    return tokens


def _num_at_once(s: State) -> int:
    """How many of all who run or wait can run at once: as many as there are rows, or as the blocks hold to their ends, if that is fewer."""
    backlog, high = s.queue.backlog, s.rows.high
    live = s.rows.num_tokens[:high] > 0
    tokens = backlog.prompt_tokens() + backlog.output_tokens() + int(s.rows.max_tokens[:high][live].sum())
    fitting = s.config.pool_tokens * (len(s.queue) + s.rows.num_active) // max(1, tokens)
    return min(s.config.max_num_seqs, fitting)


def _has_room(s: State) -> bool:
    """Whether there are blocks for all who wait beside those who run, to all their ends. Else some follow others."""
    backlog, high = s.queue.backlog, s.rows.high
    live = s.rows.num_tokens[:high] > 0
    growth = int((s.rows.max_tokens[:high] - s.rows.num_tokens[:high])[live].sum())
    return backlog.prompt_tokens() + backlog.output_tokens() + growth <= s.kv.pool.num_free * s.config.block_size
