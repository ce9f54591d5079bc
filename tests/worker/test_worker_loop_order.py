"""The order of plans: whatever a link loses, repeats or shuffles, each step of an epoch is applied once and in turn."""

from hypothesis import given
from hypothesis import strategies as st

from pagecast_worker.link import PlanOrder, Verdict


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), max_size=80))
def test_applied_steps_are_consecutive_in_each_epoch(events: list[tuple[int, int, bool]]) -> None:
    order = PlanOrder()
    applied: list[tuple[int, int]] = []
    gaps: list[tuple[int, int]] = []
    for epoch, step, opens in events:
        before = order.epoch, order.last_step
        if opens:
            assert order.start_epoch(epoch) == (epoch > before[0])
            continue
        verdict = order.judge(epoch, step)
        if verdict is Verdict.APPLY:
            applied.append((epoch, step))
        else:
            assert (order.epoch, order.last_step) == before
        if verdict is Verdict.GAP:
            assert epoch == order.epoch and step > order.last_step + 1
            gaps.append((order.epoch, order.last_step))
        if verdict is Verdict.DUPLICATE:
            assert (epoch, step) in applied or step == 0
    for epoch in range(4):
        steps = [step for e, step in applied if e == epoch]
        assert steps == list(range(1, len(steps) + 1))
    assert applied == sorted(applied)
    assert len(gaps) == len(set(gaps)), "a gap was reported twice"


@given(st.data())
def test_resending_loses_nothing(data: st.DataObject) -> None:
    """A scheduler that sends 1..n over a link that drops and repeats gets all applied if it sends again after a gap, and when its
    clock says that nothing moves (a lost last plan, or a lost answer to a gap, shows no new gap)."""
    count, drops = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 20))
    order = PlanOrder()
    order.start_epoch(1)
    applied: list[int] = []
    queue: list[int] = []
    while len(applied) < count:
        queue = queue or list(range(order.last_step + 1, count + 1))
        step = queue.pop(0)
        fate = data.draw(st.sampled_from(("pass", "drop", "twice"))) if drops else "pass"
        drops -= fate == "drop"
        for _ in range({"drop": 0, "pass": 1, "twice": 2}[fate]):
            verdict = order.judge(1, step)
            if verdict is Verdict.APPLY:
                applied.append(step)
            elif verdict is Verdict.GAP:
                queue += range(order.last_step + 1, count + 1)
    assert applied == list(range(1, count + 1))


def test_before_the_first_epoch_nothing_is_applied() -> None:
    order = PlanOrder()
    assert order.judge(0, 1) is Verdict.OTHER_EPOCH
    assert order.judge(1, 1) is Verdict.OTHER_EPOCH
