"""The rules of recovery as arithmetic: step deadlines, the brake on crash loops, and who has compiled a constraint."""

from pagecast_scheduler.engine.preparing import Preparing
from pagecast_scheduler.engine.recovery import DEADLINE_FACTOR, SECOND, CrashLoopBrake, StepClock
from pagecast_wire.sampling import ConstraintFault

FLOOR = 5 * SECOND


def test_deadline_is_floor_plus_multiple_of_what_was_learned() -> None:
    clock = StepClock(FLOOR)
    assert clock.deadline() is None and not clock.is_stalled(10**12)
    clock.sent(1, 100, 1000)
    assert clock.deadline() == 1000 + FLOOR, "nothing is known yet"
    clock.done(1, 1000 + 20_000)
    clock.sent(2, 100, 50_000)
    assert clock.deadline() == 50_000 + FLOOR + DEADLINE_FACTOR * 20_000
    assert not clock.is_stalled(50_000 + FLOOR // 2) and clock.is_stalled(50_000 + FLOOR // 2 + DEADLINE_FACTOR * 10_000 + 1)


def test_larger_steps_are_predicted_in_proportion_and_smaller_ones_not_below_what_is_known() -> None:
    clock = StepClock(FLOOR)
    clock.sent(1, 64, 0)
    clock.done(1, 10_000)
    assert clock.predict(64) == 10_000
    assert clock.predict(2048) == 320_000
    assert clock.predict(1) == 10_000


def test_a_queued_step_begins_when_its_predecessor_ends() -> None:
    clock = StepClock(FLOOR)
    clock.sent(1, 1, 0)
    clock.sent(2, 1, 10)
    clock.done(1, 4 * SECOND)
    assert clock.next_step == 2 and clock.deadline() == 4 * SECOND + FLOOR + DEADLINE_FACTOR * 4 * SECOND
    clock.done(1, 5 * SECOND)
    assert clock.next_step == 2, "a repeated result changes nothing"
    clock.done(2, 4 * SECOND + 500)
    assert clock.num_in_flight == 0
    assert clock.predict(1) < 4 * SECOND


def test_the_schedulers_own_pause_is_nobodys_fault() -> None:
    clock = StepClock(FLOOR)
    clock.sent(1, 1, 0)
    clock.forgive(100 * SECOND)
    assert clock.deadline() == 100 * SECOND + FLOOR
    clock.reset(200 * SECOND)
    assert clock.deadline() is None


def test_brake_is_free_at_first_then_doubles_then_gives_up() -> None:
    brake = CrashLoopBrake(free=2, limit=8, window=100 * SECOND, longest=4 * SECOND)
    delays = [brake.failed(at) - at for at in range(6)]
    assert delays == [0, 0, SECOND // 2, SECOND, 2 * SECOND, 4 * SECOND]
    assert brake.is_braking(6) and not brake.is_hopeless(6)
    brake.failed(6)
    assert brake.failed(7) - 7 == 4 * SECOND
    assert brake.is_hopeless(7)
    assert not brake.is_braking(101 * SECOND) and not brake.is_hopeless(101 * SECOND)


def test_a_constraint_is_settled_by_all_ranks_or_the_first_that_cannot() -> None:
    book, ranks, fine, late = Preparing(), (0, 1), ConstraintFault.NONE, ConstraintFault.TIMED_OUT
    assert [book.answered(b"d", rank, fine, ranks) for rank in ranks] == [False, True]
    assert [book.answered(b"d", 0, late, ranks), book.answered(b"d", 1, fine, ranks), len(book)] == [True, False, 0]
    assert [book.answered(b"d", 0, late, ranks), book.answered(b"d", 1, late, ranks), len(book)] == [True, False, 0]


def test_an_answer_that_is_late_is_none_to_the_next_question() -> None:
    book, ranks, fine, late = Preparing(), (0, 1), ConstraintFault.NONE, ConstraintFault.TIMED_OUT
    assert book.answered(b"d", 0, late, ranks)
    assert not book.answered(b"d", 0, fine, ranks)  # asked again, while rank 1 has not answered the first time
    assert not book.answered(b"d", 1, late, ranks)
    assert book.answered(b"d", 1, fine, ranks) and len(book) == 0
    book.answered(b"d", 0, fine, ranks)
    book.clear()
    assert len(book) == 0
