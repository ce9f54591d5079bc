"""Mutations around constraints, log-probabilities and rules that leave no token; see `planted`."""

from typing import Any

from sim.planted import Patch, mutation

from pagecast_scheduler.core import applying, forced, intake, planning, recovery
from pagecast_scheduler.core.constraints import Constraints
from pagecast_scheduler.core.outputs import Outputs
from pagecast_scheduler.core.rows import Rows
from pagecast_scheduler.core.state import State


@mutation
def constraints_outlive_their_workers(patch: Patch) -> None:
    """New workers are taken to have compiled what the old ones had."""
    patch(recovery, "_ask_again", lambda s: None)


@mutation
def nobody_waits_for_the_compiler(patch: Patch) -> None:
    """A constrained request enters the queue at once."""
    original = Constraints.expect

    def expect(self: Constraints, request: Any) -> None:
        original(self, request)
        request.preparing = False

    patch(Constraints, "expect", expect)


@mutation
def constrained_rows_in_plans_of_several_steps(patch: Patch) -> None:
    """The next token of a constrained row is drawn before the last one is known."""
    original = planning._num_steps

    def num_steps(s: Any, now: int) -> int:
        constrained, s.rows.num_constrained = s.rows.num_constrained, 0
        try:
            return original(s, now)
        finally:
            s.rows.num_constrained = constrained

    patch(planning, "_num_steps", num_steps)


@mutation
def prompts_told_again_after_a_preemption(patch: Patch) -> None:
    """What was told of a prompt is forgotten when it is computed again."""
    original = applying.tell_prompts

    def tell(s: Any, record: Any, result: Any) -> None:
        for row, generation in record.telling:
            seq = s.holder(row, generation)
            if seq is not None:
                seq.request.prompt_told = 1
        original(s, record, result)

    patch(applying, "tell_prompts", tell)


@mutation
def prompt_logprobs_from_the_cache(patch: Patch) -> None:
    """A request for a prompt's log-probabilities may skip what the cache holds."""
    patch(intake, "replace", lambda submit, **changes: submit)


@mutation
def dead_rows_live_on(patch: Patch) -> None:
    """A row without any token left is taken for one that sat out a step."""
    patch(applying, "_apply_dead", lambda s, record, at, flags, now: None)


@mutation
def logprobs_of_the_last_step_are_lost(patch: Patch) -> None:
    """Sequences that only wait for their last results are forgotten."""
    original = applying._apply_detached
    patch(applying, "_apply_detached", lambda s, cohort, at, tokens, flags, logprobs, now: original(s, cohort, at, tokens, flags, {}, now))


@mutation
def decodes_computed_again_are_not_counted(patch: Patch) -> None:
    """Only prompts and histories count as recomputed, not the tokens that were in flight when a row was taken away."""
    original = State.leave_row

    def leave_row(self: State, seq: Any) -> Any:
        count = seq.num_recomputed_tokens
        left = original(self, seq)
        seq.num_recomputed_tokens = count
        return left

    patch(State, "leave_row", leave_row)


@mutation
def forced_tokens_outlive_their_row(patch: Patch) -> None:
    """Who gets a row next goes on with what its last owner had to say."""
    original = Rows.close

    def close(self: Rows, row: int) -> None:
        run = self.forced.get(row)
        original(self, row)
        if run is not None:
            self.forced[row] = run

    patch(Rows, "close", close)


def _while_planning_jumps(patch: Patch, change: Any) -> None:
    """plan_jumps with an array of the rows changed, and put back, around it. change: (state) -> (array, value)."""
    original = forced.plan_jumps

    def plan_jumps(s: State, draft: Any, budget: int) -> int:
        array, value = change(s)
        kept, array[:] = array.copy(), value
        try:
            return original(s, draft, budget)
        finally:
            array[:] = kept

    patch(forced, "plan_jumps", plan_jumps)


@mutation
def forced_tokens_without_blocks(patch: Patch) -> None:
    """A jump is not counted against the blocks that its row has."""
    _while_planning_jumps(patch, lambda s: (s.rows.capacity, 1 << 20))


@mutation
def forced_tokens_beyond_the_limit(patch: Patch) -> None:
    """A jump ends with the last token that the sequence may have, and one more is drawn."""
    _while_planning_jumps(patch, lambda s: (s.rows.max_tokens, s.rows.max_tokens + 1))


@mutation
def forced_tokens_planned_twice(patch: Patch) -> None:
    """A jump begins where results have come in, not where the plans in flight will end."""
    _while_planning_jumps(patch, lambda s: (s.rows.num_planned, s.rows.num_tokens))


@mutation
def forced_tokens_ignore_the_budget(patch: Patch) -> None:
    """Only decodes and prompts count against max_num_batched_tokens."""
    original = forced.plan_jumps

    def plan_jumps(s: State, draft: Any, budget: int) -> int:
        original(s, draft, budget + 1000)
        return budget

    patch(forced, "plan_jumps", plan_jumps)


@mutation
def forced_tokens_are_not_streamed(patch: Patch) -> None:
    """The sequence has them, its front end never hears of them."""
    original = forced.land

    def land(s: State, record: Any, result: Any) -> None:
        outputs, s.outputs = s.outputs, Outputs()
        try:
            original(s, record, result)
        finally:
            s.outputs = outputs

    patch(forced, "land", land)


@mutation
def forced_tokens_of_a_sequence_let_go_are_lost(patch: Patch) -> None:
    """A row at its limit was let go after a jump was planned for it: only its last token arrives."""
    original = forced.land

    def land(s: State, record: Any, result: Any) -> None:
        record.jumps = [jump for jump in record.jumps if s.rows.generation[jump.row] == jump.generation]
        original(s, record, result)

    patch(forced, "land", land)
