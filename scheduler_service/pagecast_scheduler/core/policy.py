"""Decisions as pure functions: they read numbers and return a choice, and change nothing."""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

MOST_AUTOMATIC_STEPS = 8
AUTOMATIC_PLAN_US = 8000
"""How long a plan of several steps may take where the configuration leaves their number open."""

FEWEST_JUMPED = 2
"""Forced tokens that are worth a chunk of their own: a single one is drawn by a plain decode step, which costs the batch less."""


MOST_STEPS_WITHOUT_PREFILL = 3
"""For how many steps little prefill is put off where decodes fill the rows. An idle row of 256 costs 1/256 of each, a step with prefill a
tenth more than one without, whatever its tokens: three gain nearly all there is."""

FLAT_STEP = 192
"""Up to about so many tokens a step takes little longer than with one, as reading the weights takes longer than the products. A token of a
prompt costs 11 us in a step of 192 with 32 decodes and 14 us beside 64; from there on, and in steps of thousands, it costs 20 to 25 (H200,
8B parameters, 30 November 2026)."""
LEAST_FILL = 96
"""Where decodes leave less of a flat step, prompts gain nothing by company, and a step with any prefill takes a millisecond longer."""
BULK = 1024
"""Then so many tokens are computed at once as soon as they are due."""
FIRST_STEP = 4096
"""With so many tokens of prompts an idle engine begins, though more of a list may be on its way: products take no longer a token from about
here on, so that one step more costs next to nothing, and the rest comes and is planned while they run (100 ms with 8B parameters)."""
FIRST_ADMISSIONS = 32
"""Requests that an idle engine's first step admits at most. To plan one takes 50 to 100 us, in which the device would stand still."""
MOST_STEPS_LATE = 3
"""So many steps prompts wait for a bulk where it costs time at the end: some must begin now to end with the longest, or others wait for
rows. Each step of it may be one more for the whole; of what steps with prefill cost beyond others, three of four are saved."""
ROWS_BUSY = 0.75
"""Outputs that would keep so much of all rows busy until the longest ends leave no room for a row that stands idle."""
STEP_GRAIN = 64
"""A step with prefill is padded to a multiple of so many tokens, so paced prefill fills one."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running sequence as victim choice sees it. urgency: its class now, ageing included, lower is more urgent.

    lost_tokens: computed tokens that a preemption throws away. protected: it already has a part in the plan being made."""

    row: int
    urgency: int
    order: int
    lost_tokens: int
    paused: bool = False
    protected: bool = False


def urgency(priority: int, waited_us: int, ageing_us: int) -> int:
    """Priority class after ageing: one class less for every ageing_us since arrival, down to -1 (overdue)."""
    return max(-1, priority - waited_us // ageing_us)


def rows_decide(outputs: int, longest: int, num_rows: int) -> bool:
    """Whether the end of a batch is decided by how full the rows are rather than by its longest output. outputs: of all who run or wait."""
    return outputs > ROWS_BUSY * longest * num_rows


def most_idle(gap: int) -> int:
    """How long at most an engine with a first request stands idle for others that follow within `gap` (microseconds), and how long after
    the last one another is still expected while a step runs. Two and a half gaps: five milliseconds give the first step of a long
    list tokens enough that the rest has come by its end; more would cost what it gives."""
    return gap * 5 // 2


def paced_prefill(needed: float, steps: int, num_decodes: int, slack: int, begun: bool = False) -> int:
    """Prefill tokens of a step beside `num_decodes`, where every step from here on needs `needed` of them and the last prefill was `steps`
    ago. What few decodes leave of a flat step is filled; beside many, prompts wait until there is a bulk of them, or too few steps are
    left to wait. slack: for how many steps waiting costs nothing; after that only prompts wait of which none has begun. 0: they wait."""
    wanted = ceil(needed)
    if FLAT_STEP - num_decodes >= LEAST_FILL:
        wanted = max(wanted, FLAT_STEP - num_decodes)
    elif needed * steps < BULK and (slack > 0 or (steps < MOST_STEPS_LATE and not begun)):
        return 0
    else:
        wanted = max(wanted, BULK)
    return -(-(num_decodes + wanted) // STEP_GRAIN) * STEP_GRAIN - num_decodes


def choose_victim(candidates: list[Running], requester: Running) -> Running | None:
    """Whom to preempt so that `requester` gets a block: least lost work, paused ones before all others.

    Never the oldest running one (which guarantees progress), never one more urgent than the requester unless its client keeps it
    from running, never the requester.
    """
    awake = [c for c in candidates if not c.paused]
    oldest = min(awake, key=lambda c: c.order) if awake else None
    eligible = [
        c for c in candidates
        if c.row != requester.row and c is not oldest and not c.protected and (c.paused or c.urgency >= requester.urgency)
    ]  # fmt: skip
    return min(eligible, key=lambda c: (not c.paused, c.lost_tokens, -c.order), default=None)


def must_stall(candidates: list[Running], requester: Running) -> bool:
    """Without a victim the requester waits in place if it is the oldest, else gives its own blocks up."""
    return all(requester.order <= c.order for c in candidates if not c.paused)


def admission_fits(needed: int, num_free: int, num_reserved: int, num_active: int) -> bool:
    """Whether a sequence may enter: all blocks of its known tokens are there besides what running prefills still need.

    While others run, one block in reserve for every eight of them keeps it from being preempted again at once."""
    return needed <= num_free - num_reserved - -(-num_active // 8)


def chunk_length(remaining: int, budget: int, room: int) -> int:
    """Prefill tokens for one row in this step. room: tokens that its blocks and the free ones still hold."""
    return max(0, min(remaining, budget, room))


def decodes_fill(num_decodes: int, max_num_seqs: int) -> bool:
    """Whether decodes hold seven of eight rows, so that who waits does so for rows: prefill put off makes no row stand idle for long."""
    return num_decodes >= max(1, max_num_seqs * 7 // 8)


def prefill_waits(wanted: int, num_decodes: int, steps_without: int) -> bool:
    """Whether the `wanted` prefill tokens at hand are put off so that more come together: fewer than the step's decodes, and the last
    prefill no more than a few steps ago."""
    return wanted < num_decodes and steps_without < MOST_STEPS_WITHOUT_PREFILL


def fitted_length(wanted: int, begun: int, before: int, sizes: tuple[int, ...]) -> int:
    """Prefill tokens, of `wanted` at hand, that make a step of `before` other tokens end on the largest of `sizes` that it reaches.

    begun: of them, those of prompts that began in earlier steps. At least half of these goes on, or what fills half of the largest size,
    so that a prompt is late by few steps; where no size allows that, all of `wanted` is computed."""
    at = bisect_right(sizes, before + wanted)
    least = before + max(1, min(begun, sizes[-1]) // 2)
    return sizes[at - 1] - before if at and sizes[at - 1] >= least else wanted


def automatic_steps(step_us: float) -> int:
    """Decode steps of a plan where the configuration leaves it open: what a new request may have to wait for stays short."""
    if step_us <= 0:
        return 1
    return max(1, min(MOST_AUTOMATIC_STEPS, int(AUTOMATIC_PLAN_US / step_us)))


def steps_in_plan(max_steps: int, most_remaining: int, us_to_next_limit: int | None, step_us: float) -> int:
    """How many decode steps one plan may carry: not more than the longest row still takes, nor past the next time limit."""
    steps = min(max_steps, most_remaining)
    if us_to_next_limit is not None and step_us > 0:
        steps = min(steps, int(us_to_next_limit / step_us))
    return max(1, steps)


def cannot_finish(estimate_us: int, left_us: int, percent: int) -> bool:
    """Conservative: `percent` of the estimate alone is more than the time left. An estimate of 0 says nothing."""
    return estimate_us * percent // 100 > left_us
