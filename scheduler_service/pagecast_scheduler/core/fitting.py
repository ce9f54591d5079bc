"""Steps that end on a size. A worker that replays recorded steps computes as many tokens as the next larger recorded one has; what is
padding there could have been prompt. So while more sequences wait than there are rows, a step takes only as much prefill as fills a
size, and the rest goes into the next one. A step with little prefill costs nearly as much as one with twice that, so little waits, for
three steps at most, until more has come to it. Whoever runs alone, or finds a free row, is never held up for either.
"""

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.state import State


def fit_budget(s: State, draft: PlanDraft, budget: int, now: int) -> int:
    """The tokens left for prefill in this step, cut so that decodes and chunks fill one of step_sizes, 0 where prefill waits for more.
    Called while the queue holds more sequences than there are free rows."""
    if draft.stalled or s.isolating() or not policy.decodes_fill(len(draft.stepping), s.config.max_num_seqs):
        return budget
    begun = sum(int(s.rows.num_tokens[row] - s.rows.num_computed[row]) for row in s.rows.prefilling if not s.rows.paused[row])
    wanted = begun
    if begun < budget and s.rows.num_free:
        wanted += s.queue.tokens_ahead(s.rows.num_free, budget - begun, now)
    if not wanted:
        return budget
    if policy.prefill_waits(wanted, len(draft.stepping), s.step - s.prefilled_in):
        return 0
    return policy.fitted_length(min(wanted, budget), begun, s.config.max_num_batched_tokens - budget, s.config.step_sizes)
