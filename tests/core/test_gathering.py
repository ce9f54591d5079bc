"""A list of class BATCH that meets an idle engine begins together: the first plans wait for what is on its way. Nobody else does."""

import pytest
from core.cluster import Cluster, make_config

from pagecast_scheduler.core import policy
from pagecast_wire.codec import view_u32
from pagecast_wire.control import WaitCause
from pagecast_wire.intake import Priority

GAP = 1000
MOST = policy.most_idle(GAP)
LENGTH = 100


def wide(**values):
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 3000, "num_blocks": 8000, "max_model_len": 512, "max_plans_in_flight": 2}
    return Cluster(**{"arrival_gap_us": GAP, "enable_prefix_caching": False} | sizes | values)


def offer(cluster, key, output=50, priority=Priority.BATCH, length=LENGTH, **values):
    cluster.submit(key, [key >> bit % 6 & 1 for bit in range(length)], output, seed=key, priority=priority, **values)


def prefill(plan):
    return sum(view_u32(plan.chunk_lengths).tolist())


def test_the_first_plan_waits_until_nothing_new_came_for_a_while():
    cluster = wide()
    for key, at in enumerate((0, 700, 1500)):
        cluster.now = at
        offer(cluster, key)
        assert cluster.plan() is None and cluster.scheduler.next_wakeup() == min(at + GAP, MOST)
    assert cluster.scheduler.explain(cluster.now)[0].cause is WaitCause.BATCH_DELAY
    cluster.now = 1500 + GAP
    assert len(cluster.plan().admissions) == 3
    assert cluster.scheduler.explain(cluster.now)[0].cause is WaitCause.NONE


def test_it_does_not_wait_for_ever():
    cluster = wide()
    for key in range(MOST // 100 + 1):
        cluster.now = key * 100
        offer(cluster, key)
        plan = cluster.plan()
        assert (plan is None) == (cluster.now < MOST)
    assert len(plan.admissions) == MOST // 100 + 1


@pytest.mark.parametrize(
    ("values", "count"), [({"max_num_batched_tokens": 5 * LENGTH}, 5), ({"max_num_seqs": 4}, 4)], ids=["a full step", "all rows"]
)
def test_it_begins_at_once_with_all_that_it_can_hold(values, count):
    cluster = wide(**values)
    for key in range(count):
        assert cluster.plan() is None
        offer(cluster, key)
    assert len(cluster.plan().admissions) == count


def test_it_begins_with_as_much_as_keeps_the_device_busy_and_goes_on_with_a_full_step():
    cluster = wide(max_num_batched_tokens=3 * policy.FIRST_STEP, num_blocks=20000, max_num_seqs=256)
    num_first = -(-policy.FIRST_STEP // 200)
    assert num_first <= policy.FIRST_ADMISSIONS
    for key in range(num_first):
        assert cluster.plan() is None
        offer(cluster, key, length=200)
    assert len(cluster.plan().admissions) == num_first
    for key in range(num_first, 100):
        more = cluster.plan()
        if more is not None:
            break
        offer(cluster, key, length=200)
    assert 3 * policy.FIRST_STEP - 200 <= prefill(more) <= 3 * policy.FIRST_STEP


def test_an_idle_engine_begins_with_a_few_of_many():
    """Whoever they are: while those are computed the others are planned."""
    for priority in (Priority.BATCH, Priority.NORMAL):
        cluster = wide(max_num_batched_tokens=1 << 14, num_blocks=20000, max_num_seqs=256)
        for key in range(2 * policy.FIRST_ADMISSIONS + 5):
            offer(cluster, key, priority=priority)
        assert len(cluster.plan().admissions) == policy.FIRST_ADMISSIONS
        cluster.now += MOST
        assert len(cluster.plan().admissions) == policy.FIRST_ADMISSIONS + 5
        assert cluster.plan() is None
        cluster.run()


def test_it_begins_at_once_where_pacing_leaves_some_for_later():
    cluster = wide()
    offer(cluster, 0, 300, length=90)
    offer(cluster, 1, 200, length=90)
    assert cluster.plan() is None, "a flat step holds both"
    offer(cluster, 2, 100, length=90)
    assert prefill(cluster.plan()) == policy.FLAT_STEP


@pytest.mark.parametrize("values", [{"priority": Priority.NORMAL}, {"priority": Priority.INTERACTIVE}, {"deadline_ms": 60_000}])
def test_one_in_a_hurry_waits_for_nobody(values):
    cluster = wide()
    offer(cluster, 0)
    assert cluster.plan() is None
    offer(cluster, 1, **values)
    assert len(cluster.plan().admissions) == 2
    assert len(cluster.plan().admissions) == 0, "nor is the next plan held back"


@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.INTERACTIVE])
def test_other_classes_know_no_wait(priority):
    cluster = wide()
    offer(cluster, 0, priority=priority)
    assert cluster.plan() and cluster.plan()
    assert cluster.scheduler.next_wakeup() is None


def begun(cluster, count=1):
    for key in range(count):
        offer(cluster, key)
    cluster.now += GAP
    assert len(cluster.plan().admissions) == count


def test_while_the_first_step_runs_the_next_plan_waits_for_more():
    cluster = wide()
    begun(cluster)
    assert cluster.plan() is None and cluster.scheduler.next_wakeup() == MOST
    cluster.now = MOST - 100
    offer(cluster, 1)
    assert cluster.plan() is None and cluster.scheduler.next_wakeup() == 2 * MOST - 100
    cluster.now = 2 * MOST - 100
    assert len(cluster.plan().admissions) == 1


def test_the_next_plan_is_made_once_the_step_that_ran_is_over():
    cluster = wide()
    begun(cluster)
    assert cluster.plan() is None
    cluster.apply()
    assert cluster.plan() is not None


def test_while_a_long_step_runs_the_plan_after_it_waits_too_but_none_after_a_step_without_prompts():
    cluster = wide()
    begun(cluster)
    for key in range(1, 1 + policy.BULK // LENGTH + 1):
        offer(cluster, key)
    assert cluster.plan() is None
    cluster.apply()
    assert prefill(cluster.plan()) >= policy.BULK
    assert cluster.plan() is None
    cluster.now += MOST
    assert prefill(cluster.plan()) == 0
    cluster.apply()
    cluster.apply()
    for key in range(20, 20 + policy.BULK // LENGTH + 1):
        offer(cluster, key)
    assert prefill(cluster.plan()) >= policy.BULK
    assert cluster.plan() is not None, "the batch runs"


def test_a_short_step_after_the_first_holds_nothing_back():
    cluster = wide()
    begun(cluster)
    offer(cluster, 1)
    cluster.apply()
    assert prefill(cluster.plan()) == LENGTH < policy.BULK
    assert cluster.plan() is not None


def test_a_list_goes_to_its_end_through_a_crash():
    cluster = wide()
    for key in range(30):
        offer(cluster, key, 5 + key % 7)
        cluster.plan()
        cluster.now += 150
    cluster.fail()
    cluster.now += MOST
    cluster.run()
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())


def test_the_field_is_checked():
    with pytest.raises(ValueError, match="arrival_gap_us is -1, must be at least 0"):
        make_config(arrival_gap_us=-1)
