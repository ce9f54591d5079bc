"""Prefill of requests in no hurry is spread over the steps of those that run. See `backlog`."""

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.state import State


def pace_budget(s: State, draft: PlanDraft, budget: int) -> int:
    """The tokens left for prefill in this step, where nobody who waits or prefills is in a hurry; else the budget as it is."""
    rows, decodes = s.rows, draft.stepping
    if s.queue.num_hurried or s.isolating() or draft.stalled:
        return budget
    begun, begun_output = 0, 0
    for row in rows.prefilling:
        if not rows.owner(row).request.is_patient:
            return budget
        begun += int(rows.num_tokens[row] - rows.num_computed[row])
        begun_output = max(begun_output, int(rows.max_tokens[row] - rows.num_tokens[row]))
    longest = int((rows.max_tokens[decodes] - rows.num_planned[decodes]).max()) if len(decodes) else 0
    needed = s.queue.backlog.tokens_a_step(longest, begun, begun_output)
    return min(budget, policy.paced_prefill(needed, s.step + 1 - s.prefilled_in, len(decodes)))
