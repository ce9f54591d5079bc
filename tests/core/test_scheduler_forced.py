"""Forced tokens in plans made by hand: when a row jumps, how far, and what arrives."""

import pytest

from pagecast_scheduler.core import invariants
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.core.state import ResultError
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.intake import Accepted, Submit
from pagecast_wire.result import FLAG_BAD, StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault, ConstraintKind, FinishReason, SamplingParams, StopRules

RUN = [11, 12, 13, 14, 15, 16]


class Hand:
    """One constrained request (key 1) with a prompt of five tokens, whose results are written by hand."""

    def __init__(self, output: int = 40, **values) -> None:
        sizes = {"num_blocks": 20, "max_num_batched_tokens": 64, "max_num_seqs": 2} | values
        self.core = Scheduler(
            SchedulerConfig(block_size=4, max_model_len=64, max_queued_requests=9, max_queued_tokens=999, **sizes), epoch=1
        )
        constraint = Constraint(ConstraintKind.JSON_OBJECT)
        submit = Submit(
            key=1, prompt=pack_u32([1, 2, 3, 4, 5]), sampling=SamplingParams(constraint=constraint), stop=StopRules(output),
            cache_namespace=bytes(32),
        )
        assert isinstance(self.core.submit(submit, 0), Accepted)
        self.core.take_constraints()
        self.core.constraint_prepared(constraint_digest(constraint), ConstraintFault.NONE, 0)
        self.received: list[int] = []
        self.reason = None
        self.answered = 0

    def plan(self):
        plan = self.core.plan_step(0)
        invariants.check(self.core)
        return plan

    def answer(self, token: int, run: list[int] = (), flags: int = 0) -> None:
        """The result of the oldest plan: a token of the one row, and what must follow it."""
        self.answered += 1
        forced = {"forced_at": pack_u32([0]), "forced_counts": pack_u32([len(run)]), "forced_tokens": pack_u32(run)} if run else {}
        self.core.apply_result(StepResult(1, self.answered, 0, pack_u32([token]), bytes([flags]), **forced), 0)
        invariants.check(self.core)
        for _, batch in self.core.take_batches():
            self.received += view_u32(batch.tokens).tolist()
            for finished in batch.finished:
                self.reason, self.usage = finished.reason, finished.usage


def jump(plan) -> tuple[list[int], list[int]]:
    return view_u32(plan.forced_counts).tolist(), view_u32(plan.forced_tokens).tolist()


def test_a_row_jumps_behind_the_plans_in_flight():
    hand = Hand()
    hand.plan()
    hand.plan()
    hand.answer(10, RUN)
    plan = hand.plan()
    assert jump(plan) == ([6], RUN), "the plan in flight draws 11; this one takes it as known and five more"
    assert len(view_u32(plan.grown_rows)) == 1, "positions 6 to 11 of blocks of 4"
    hand.answer(11)
    assert hand.received == [10, 11]
    assert jump(hand.plan()) == ([], [])
    hand.answer(20)
    assert hand.received == [10, *RUN, 20]
    assert hand.core.stats().forced_tokens == 5 and hand.core.stats().output_tokens == 8


def test_a_jump_that_saves_less_than_two_steps_is_not_made():
    hand = Hand()
    hand.plan()
    hand.plan()
    hand.answer(10, RUN[:2])
    assert jump(hand.plan()) == ([], [])


def test_the_budget_cuts_a_jump_and_the_rest_follows():
    hand = Hand(max_num_batched_tokens=5, max_plans_in_flight=1)
    hand.plan()
    hand.answer(10, RUN)
    assert jump(hand.plan()) == ([5], [10, *RUN[:4]])
    hand.answer(15)
    assert jump(hand.plan()) == ([], [])
    hand.answer(16)
    hand.plan()
    hand.answer(20)
    assert hand.received == [10, *RUN, 20]


def test_blocks_cut_a_jump():
    """Nine tokens have a place in what the pool holds; the run would need eleven."""
    hand = Hand(output=4, num_blocks=4, max_plans_in_flight=1)
    hand.plan()
    hand.answer(10, RUN)
    assert jump(hand.plan()) == ([3], [10, 11, 12]), "and the last token of all is drawn"
    hand.answer(13)
    assert (hand.received, hand.reason) == ([10, 11, 12, 13], FinishReason.LENGTH)
    assert hand.usage.output_tokens == 4 and hand.core.stats().num_blocks_referenced == 0


def test_a_paused_row_jumps_when_it_goes_on():
    hand = Hand(max_plans_in_flight=1)
    hand.plan()
    hand.core.pause(1, True, 0)
    hand.answer(10, RUN)
    assert hand.plan() is None
    hand.core.pause(1, False, 0)
    assert jump(hand.plan()) == ([7], [10, *RUN])


def test_forced_tokens_of_a_step_that_went_wrong_are_not_told():
    hand = Hand(max_plans_in_flight=1)
    hand.plan()
    hand.answer(10, RUN)
    hand.plan()
    hand.answer(0, flags=FLAG_BAD)
    assert (hand.received, hand.reason) == ([10], FinishReason.NUMERIC_FAULT)


def test_a_token_that_is_not_the_forced_one_is_the_workers_fault():
    hand = Hand()
    hand.plan()
    hand.plan()
    hand.answer(10, RUN)
    hand.plan()
    hand.core.apply_result(StepResult(1, 2, 0, pack_u32([99]), b"\0"), 0)
    with pytest.raises(ResultError, match="drew 99 where 11 was forced"):
        hand.core.apply_result(StepResult(1, 3, 0, pack_u32([20]), b"\0"), 0)


@pytest.mark.parametrize("change", [{"forced_at": pack_u32([1])}, {"forced_counts": pack_u32([5])}, {"forced_tokens": b""}])
def test_columns_that_do_not_fit_are_refused(change):
    hand = Hand()
    hand.plan()
    columns = {"forced_at": pack_u32([0]), "forced_counts": pack_u32([6]), "forced_tokens": pack_u32(RUN)} | change
    with pytest.raises(ResultError):
        hand.core.apply_result(StepResult(1, 1, 0, pack_u32([10]), b"\0", **columns), 0)
