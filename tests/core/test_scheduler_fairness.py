"""Who goes first, who is passed, and how long anybody can be kept waiting."""

import pytest
from core.cluster import Cluster

from pagecast_scheduler.core.policy import Running, admission_fits, cannot_finish, choose_victim, must_stall, steps_in_plan
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import Phase, Priority
from pagecast_wire.sampling import FinishReason

STEP_US = 1000


def admitted(cluster):
    """Keys in the order of their first admission."""
    order = sorted(
        (stream.finished.usage.queue_us + arrival, key) for (key, _), (stream, arrival) in
        ((name, (stream, cluster.arrivals[name[0]])) for name, stream in cluster.streams.items())
    )  # fmt: skip
    return [key for _, key in order]


class Timed(Cluster):
    """Remembers when each request arrived."""

    def __init__(self, **values):
        super().__init__(**values)
        self.arrivals = {}

    def submit(self, key, *args, **values):
        self.arrivals[key] = self.now
        return super().submit(key, *args, **values)


def one_at_a_time(**values):
    return Timed(max_num_seqs=1, max_plans_in_flight=1, ageing_us=10**9, **values)


def test_a_more_urgent_class_goes_first():
    cluster = one_at_a_time()
    for key, priority in ((1, Priority.BATCH), (2, Priority.NORMAL), (3, Priority.INTERACTIVE)):
        cluster.submit(key, [1, key & 1], 3, priority=priority)
    cluster.run()
    assert admitted(cluster) == [3, 2, 1]


def test_within_a_class_the_nearest_deadline_then_the_first_come():
    cluster = one_at_a_time()
    for key, deadline in ((1, -1), (2, -1), (3, 5000), (4, 900)):
        cluster.submit(key, [1, key & 1], 3, deadline_ms=deadline)
    cluster.run()
    assert admitted(cluster) == [4, 3, 1, 2]


def test_tenants_share_by_tokens_not_by_requests():
    cluster = Cluster(max_num_seqs=2, max_plans_in_flight=1, num_blocks=64)
    for turn in range(30):  # one asks for much at a time, the other for little; both have more waiting than fits
        cluster.submit(100 + turn, [1, turn & 1], 16, tenant="large")
        for part in range(6):
            cluster.submit(1000 + 10 * turn + part, [0, turn & 1], 2, tenant="small")
    for _ in range(200):
        cluster.step()
    served = {"large": 0, "small": 0}
    for (key, _), stream in cluster.streams.items():
        served["large" if key < 1000 else "small"] += len(stream.tokens) + 2 * bool(stream.tokens)
    assert 0.8 < served["large"] / served["small"] < 1.25
    cluster.run()


def test_a_returning_tenant_has_earned_no_credit_by_its_absence():
    cluster = one_at_a_time()
    cluster.submit(1, [1], 1, tenant="away")
    cluster.run()
    for key in range(10, 40):
        cluster.submit(key, [1, key & 1], 5, tenant="busy")
    for _ in range(60):
        cluster.step()
    for key in range(50, 80):
        cluster.submit(key, [1, key & 1], 5, tenant="away")
    cluster.run()
    order = admitted(cluster)
    after = [key for key in order if order.index(key) >= order.index(50)][:16]
    assert 6 <= sum(key < 50 for key in after) <= 10  # turn by turn, not thirty in a row


def test_what_a_tenant_computed_alone_is_not_held_against_it():
    """It had the engine to itself, and nobody was there when the newcomer came."""
    cluster = one_at_a_time()
    for key in range(1, 9):
        cluster.submit(key, [1, key & 1], 40, tenant="night")
    cluster.run()
    for key in range(10, 40):
        cluster.submit(key, [1, key & 1], 5, tenant="newcomer")
    for key in range(50, 80):
        cluster.submit(key, [1, key & 1], 5, tenant="night")
    cluster.run()
    first = admitted(cluster)[8:24]
    assert 6 <= sum(key < 50 for key in first) <= 10


@pytest.mark.parametrize("size", [2, 24])
def test_starvation_bound(size):
    """The least urgent request under a flood of urgent ones, which alone exceed what the engine can do.

    Bound (queue.py): from (class + 1) * ageing_us after its arrival on, at most max_head_passes later arrivals go before it.
    """
    ageing, passes = 20 * STEP_US, 3
    cluster = Timed(max_num_seqs=3, num_blocks=10, max_num_batched_tokens=32, ageing_us=ageing, max_head_passes=passes)
    for turn in range(400):
        if turn == 20:
            cluster.submit(1, [1] * size, 4, priority=Priority.BATCH)
        cluster.submit(100 + turn, [0, 1, turn & 1], 6, priority=Priority.INTERACTIVE)
        cluster.step()
        if (1, 0) in cluster.streams and cluster.streams[1, 0].reason is not None:
            break
    mine = cluster.streams[1, 0].finished
    assert mine is not None, "starved"
    overdue, admitted_at = cluster.arrivals[1] + 3 * ageing, cluster.arrivals[1] + mine.usage.queue_us
    assert admitted_at >= overdue, "the flood did not last"
    later = [
        key for key, arrival in cluster.arrivals.items()
        if arrival > cluster.arrivals[1] and (end := cluster.streams[key, 0].finished)
        and overdue < arrival + end.usage.queue_us < admitted_at
    ]  # fmt: skip
    assert len(later) <= passes


def test_a_blocked_head_is_passed_a_bounded_number_of_times():
    cluster = Timed(num_blocks=12, max_num_seqs=8, max_head_passes=2, ageing_us=10**9, max_plans_in_flight=1)
    cluster.submit(1, [1] * 20, 12)
    cluster.step()
    cluster.submit(2, [0, 1] * 13, 8)  # does not fit beside the first
    for key in range(3, 9):
        cluster.submit(key, [0, 0, key & 1], 2)
    cluster.run()
    order = admitted(cluster)
    assert order.index(2) == 3  # the running one, and two that passed
    assert cluster.streams[2, 0].finished.usage.num_preemptions == 0


def test_a_more_urgent_running_request_is_not_preempted_for_a_less_urgent_one():
    cluster = Cluster(num_blocks=9, max_num_seqs=3, ageing_us=10**9)
    for key, length, priority in ((1, 6, Priority.INTERACTIVE), (2, 10, Priority.BATCH), (3, 6, Priority.INTERACTIVE)):
        cluster.submit(key, [key & 1] * length, 8, priority=priority)
        cluster.plan()
    cluster.run()
    preempted = [cluster.streams[key, 0].finished.usage.num_preemptions for key in (1, 2, 3)]
    assert preempted[0] == preempted[2] == 0 and preempted[1] > 0  # although it had the most to lose


def test_a_pool_that_is_too_small_for_all_always_moves_on():
    cluster = Cluster(num_blocks=6, block_size=2, max_num_seqs=5, max_num_batched_tokens=8)
    for key in range(1, 9):
        cluster.submit(key, [key & 1, 1, key >> 1 & 1], 6, priority=key % 3)
    cluster.run(limit=400)
    assert cluster.scheduler.stats().num_preemptions > 0


def running(row, urgency=1, order=None, lost=10, **values):
    return Running(row, urgency, row if order is None else order, lost, **values)


@pytest.mark.parametrize(
    ("candidates", "requester", "victim"),
    [
        ([running(0), running(1, lost=9), running(2, lost=3)], 0, 2),  # least lost work
        ([running(0, lost=1), running(1, lost=9), running(2, lost=8)], 1, 2),  # never the oldest
        ([running(0), running(1, urgency=0, lost=1), running(2, lost=8)], 0, 2),  # never a more urgent one
        ([running(0), running(1, lost=1, protected=True), running(2, lost=8)], 0, 2),  # never one with a part in the plan
        ([running(0), running(1, lost=1), running(2, lost=8, paused=True)], 0, 2),  # paused ones before all others
        ([running(0, paused=True), running(1), running(2)], 2, 0),  # even if it is the oldest
        ([running(0), running(1)], 1, None),
        ([running(0)], 0, None),
    ],
)
def test_choose_victim(candidates, requester, victim):
    chosen = choose_victim(candidates, candidates[requester])
    assert (None if chosen is None else chosen.row) == victim


def test_only_the_oldest_stalls():
    candidates = [running(0), running(1)]
    assert must_stall(candidates, candidates[0]) and not must_stall(candidates, candidates[1])


def test_an_admission_leaves_room_for_those_that_run():
    assert admission_fits(4, 4, 0, 0) and not admission_fits(4, 4, 0, 1)
    assert admission_fits(4, 5, 0, 8) and not admission_fits(4, 5, 1, 8)


def test_steps_in_plan_end_before_a_limit():
    assert steps_in_plan(8, 100, None, 10.0) == 8
    assert steps_in_plan(8, 3, None, 10.0) == 3
    assert steps_in_plan(8, 100, 45, 10.0) == 4
    assert steps_in_plan(8, 100, -5, 10.0) == 1


def test_an_estimate_is_believed_in_part_only():
    assert not cannot_finish(190, 100, 50) and cannot_finish(210, 100, 50)
    assert not cannot_finish(0, 0, 50)


def test_decodes_go_on_while_a_prompt_of_any_length_comes_in():
    cluster = Cluster(max_num_batched_tokens=6, max_num_seqs=2, num_blocks=64, max_plans_in_flight=1)
    cluster.submit(1, [1, 0], 40)
    cluster.step()
    cluster.submit(2, [1, 0] * 25, 2)
    before = len(cluster.streams[1, 0].tokens)
    steps = 0
    while not cluster.streams[2, 0].tokens:
        plan = cluster.plan()
        cluster.apply()
        steps += 1
        assert view_u32(plan.chunk_lengths).sum() <= 5
    assert len(cluster.streams[1, 0].tokens) == before + steps and steps == 10
    cluster.run()


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 2, "num_blocks": 64}, {"max_num_seqs": 4, "num_blocks": 8}], ids=["rows", "blocks"])
def test_those_whose_clients_do_not_read_keep_nobody_waiting(sizes):
    cluster = Cluster(**sizes)
    for key in (1, 2):
        cluster.submit(key, [1, 0, key & 1, 0, 1, 1, 0, 1], 12, priority=Priority.INTERACTIVE)
    for _ in range(4):
        cluster.step()
    for key in (1, 2):
        cluster.scheduler.pause(key, True, cluster.now)
    cluster.submit(3, [0] * 8, 16, priority=Priority.BATCH)
    while cluster.step():
        pass
    assert cluster.streams[3, 0].reason is FinishReason.LENGTH
    assert cluster.streams[1, 0].reason is cluster.streams[2, 0].reason is None
    assert all(progress[-1].phase is Phase.PAUSED_SLOW_CONSUMER for key, progress in cluster.progress.items() if key != 3)
    for key in (1, 2):
        cluster.scheduler.pause(key, False, cluster.now)
    cluster.run()
    assert {stream.reason for stream in cluster.streams.values()} == {FinishReason.LENGTH}


def test_a_paused_sequence_stays_where_it_is_while_there_is_room():
    cluster = Cluster()
    cluster.submit(1, [1, 0], 12)
    cluster.step()
    cluster.scheduler.pause(1, True, cluster.now)
    cluster.submit(2, [0, 0], 12)
    while cluster.step():
        pass
    assert cluster.streams[2, 0].reason is FinishReason.LENGTH
    assert cluster.state.rows.num_active == 1 and not cluster.scheduler.stats().num_preemptions
