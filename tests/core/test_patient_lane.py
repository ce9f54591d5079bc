"""Requests of class BATCH that have waited until they are overdue: the longest still begin first, others do not stand behind all of them,
and nobody waits for ever."""

import pytest
from core.cluster import Cluster

from pagecast_scheduler.core.request import PATIENT_US
from pagecast_wire.intake import Priority

AGEING = 5000
OVERDUE_US = 3 * AGEING
"""After so long a request of class BATCH is overdue. A step takes 1000 us."""


def narrow(**values):
    sizes = {"max_num_seqs": 2, "num_blocks": 4000, "max_model_len": 4096, "max_num_batched_tokens": 64, "max_plans_in_flight": 1}
    return Cluster(**sizes | {"enable_prefix_caching": False, "ageing_us": AGEING} | values)


def submit(cluster, key, output, priority=Priority.BATCH, **values):
    cluster.submit(key, [1, key & 1], output, seed=key, priority=priority, **values)


def begun(cluster):
    """Keys in the order of their admissions."""
    return [admission.sampling.seed for plan in cluster.plans for admission in plan.admissions]


def steps_until(cluster, key, limit):
    """How many steps pass before the request is admitted."""
    for steps in range(limit):
        cluster.step()
        if key in begun(cluster):
            return steps
    raise AssertionError(f"not admitted in {limit} steps")


def test_the_longest_begin_first_however_long_they_waited():
    cluster = narrow()
    outputs = [10, 40, 12, 38, 14, 36, 16, 34, 18, 32, 20, 30]
    for key, output in enumerate(outputs):
        submit(cluster, key, output)
    cluster.run()
    assert cluster.now > 5 * OVERDUE_US
    assert [outputs[key] for key in begun(cluster)] == sorted(outputs, reverse=True)
    assert len(cluster.plans) < sum(outputs) / 2 + 10, "both rows are busy to the end"


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.NORMAL])
def test_an_urgent_one_does_not_stand_behind_an_overdue_list(priority):
    cluster = narrow()
    for key in range(60):
        submit(cluster, key, 6)
    cluster.now += OVERDUE_US
    for _ in range(8):
        cluster.step()
    submit(cluster, 1000, 6, priority)
    submit(cluster, 1001, 6, priority)
    cluster.run()
    order = begun(cluster)
    before = [key for key in order[: order.index(1001)] if key < 1000 and key not in order[:2]]
    assert order.index(1001) - order.index(1000) == 2, "by turns"
    assert len(before) < 12, "those that began before it came, and one for each of the two"


def test_an_overdue_list_goes_on_beside_urgent_ones_that_never_stop():
    """Each of both kinds gets every second admission."""
    cluster = narrow(ageing_us=10 * AGEING)
    for key in range(20):
        submit(cluster, key, 6)
    cluster.now += 30 * AGEING
    for turn in range(200):
        submit(cluster, 1000 + turn, 3, Priority.INTERACTIVE)
        cluster.step()
    order = begun(cluster)
    last = max(order.index(key) for key in range(20))
    urgent = [key for key in order[:last] if key >= 1000]
    assert 15 <= len(urgent) <= 25


def test_who_is_overdue_of_another_class_and_came_before_goes_before():
    cluster = narrow(max_num_seqs=1)
    submit(cluster, 0, 60, Priority.NORMAL)
    cluster.step()
    submit(cluster, 1, 5, Priority.NORMAL)
    submit(cluster, 2, 5, Priority.NORMAL)
    submit(cluster, 3, 5)
    submit(cluster, 4, 5, Priority.NORMAL)
    cluster.run()
    assert begun(cluster) == [0, 1, 2, 3, 4]


def test_a_short_one_does_not_wait_for_ever_for_longer_ones_that_keep_coming():
    """A token of output counts 10 ms of waiting, which is ten steps here."""
    cluster = narrow()
    submit(cluster, 0, 30)
    submit(cluster, 1, 30)
    cluster.step()
    submit(cluster, 2, 4)
    came = len(cluster.plans)
    while 2 not in begun(cluster):
        submit(cluster, 100 + len(cluster.plans) - came, 10)
        cluster.step()
        assert len(cluster.plans) < 1000, "starved"
    passed = [key - 100 for key in begun(cluster) if key >= 100]
    assert 50 <= len(passed) <= 70 and max(passed) <= 61, "ten steps for each of six tokens"


@pytest.mark.parametrize("limit", ["deadline_ms", "time_budget_ms", "max_queue_ms"])
def test_one_whose_limit_comes_near_goes_before_longer_ones(limit):
    cluster = narrow(max_num_seqs=1)
    submit(cluster, 0, 40)
    cluster.step()
    submit(cluster, 1, 5, **{limit: PATIENT_US // 1000 + 60})
    for key in range(2, 8):
        submit(cluster, key, 30)
    cluster.now += OVERDUE_US
    cluster.run()
    order = begun(cluster)
    assert order.index(1) == 2, "one of the longer ones began, while the limit was far away"
    assert order[-1] != 1
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())


def test_the_place_that_a_request_is_told_is_that_in_which_it_comes():
    cluster = narrow(max_num_seqs=1)
    submit(cluster, 0, 20, Priority.NORMAL)
    cluster.step()
    for key, output in ((1, 4), (2, 6), (3, 5), (4, 7)):
        submit(cluster, key, output)
    cluster.now += OVERDUE_US
    submit(cluster, 5, 3, Priority.INTERACTIVE)
    submit(cluster, 6, 3, Priority.INTERACTIVE)
    assert cluster.state.queue.tokens_ahead(1, 1, cluster.now) == 2  # a look at who is next
    told = [seq.request.key for seq in cluster.state.queue.waiting()]
    cluster.run()
    assert told == begun(cluster)[1:] == [4, 5, 2, 6, 3, 1]
