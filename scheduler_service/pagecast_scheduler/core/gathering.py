"""When no plan is made though one could be, because more requests are on their way that had better begin with those that are there.

An idle engine waits for batch_delay_us, whoever comes. A list of class BATCH comes within some ten milliseconds, and each part of it that
begins by itself makes the whole one step longer at its end. So where arrival_gap_us is given, the first plan waits until there is as much
as keeps the device busy while the rest comes, or none of it has come for that long. No plan is made ahead, while the first step or a long
one runs, before arrivals have paused or the next step is full. Nobody in a hurry is held up, and nobody once a step had no prompt to
compute.
"""

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.pacing import paced_tokens
from pagecast_scheduler.core.request import NEVER
from pagecast_scheduler.core.state import State


def held_until(s: State, now: int) -> int:
    """Until when the next plan is held back; a time that is over: it is not. Asked again whenever anything comes in."""
    if not s.rows.num_active and not s.in_flight:
        return max(_delayed_until(s), _gathers_until(s, now)) if len(s.queue) else -NEVER
    return _begins_until(s, now) if s.began and s.in_flight else -NEVER


def note_plan(s: State, was_idle: bool, hurried: bool, has_prefill: bool) -> None:
    """A plan was made. was_idle, hurried: what the engine and the queue were before it."""
    if hurried or not has_prefill:
        s.began = 0
    elif was_idle:
        s.began = s.step


def _delayed_until(s: State) -> int:
    delay = s.config.batch_delay_us
    if not delay or len(s.queue) >= s.config.max_num_seqs:
        return -NEVER
    return _first_arrival(s) + delay


def _gathers_until(s: State, now: int) -> int:
    gap = s.config.arrival_gap_us
    until = min(s.arrived_at + gap, _first_arrival(s) + policy.most_idle(gap))
    return until if until > now and not _is_enough(s, now, policy.FIRST_STEP) else -NEVER


def _begins_until(s: State, now: int) -> int:
    """Rows hold prompts of the same list, and what is in flight computes some."""
    newest = s.in_flight[-1]
    until = s.arrived_at + policy.most_idle(s.config.arrival_gap_us)
    if until <= now or not (newest.step == s.began or newest.num_computed_tokens >= policy.BULK):
        return -NEVER
    return -NEVER if _is_enough(s, now, s.config.max_num_batched_tokens) else until


def _is_enough(s: State, now: int, size: int) -> bool:
    """Whether what waits fills a step of this size, as far as limits and pacing let it, or all rows; or whether somebody is in a hurry."""
    tokens = s.queue.backlog.prompt_tokens() + sum(int(s.rows.num_tokens[row] - s.rows.num_computed[row]) for row in s.rows.prefilling)
    decodes = s.rows.stepping_rows()
    if s.isolating() or s.queue.is_hurried(now) or len(s.queue) >= s.rows.num_free:
        return True
    paced = paced_tokens(s, decodes, now)
    return tokens >= min(size, s.config.max_num_batched_tokens) - len(decodes) or bool(paced and paced < tokens)


def _first_arrival(s: State) -> int:
    return min(request.arrival for request in s.requests.values())
