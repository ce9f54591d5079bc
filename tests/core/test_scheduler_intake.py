"""What is refused, why, and what time alone ends."""

import pytest
from core.cluster import Cluster, make_config, make_submit

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.estimates import FEWEST_MEASURED, Estimates
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.intake import Accepted, Rejected, RejectReason
from pagecast_wire.sampling import FinishReason

ONES = [1] * 10


def refusal(cluster, *args, **values):
    answer = cluster.submit(*args, **values)
    assert isinstance(answer, Rejected)
    return answer.reason, answer.field, answer.limit, answer.actual


def warmed_up(step_us, **values):
    """A cluster that knows its rate: one token takes step_us."""
    cluster = Cluster(max_plans_in_flight=1, **values)
    cluster.submit(999, [1], 30)
    for _ in range(30):
        cluster.plan()
        cluster.now += step_us
        cluster.apply()
    return cluster


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([1] * 64, 1, (RejectReason.PROMPT_TOO_LONG, "prompt", 63, 64)),
        ([1] * 60, 5, (RejectReason.TOO_MANY_TOKENS, "max_output_tokens", 64, 65)),
        ([], 1, (RejectReason.INVALID, "prompt", 0, 0)),
        ([1], 0, (RejectReason.INVALID, "max_output_tokens", 0, 0)),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt, output, expected):
    assert refusal(Cluster(), 1, prompt, output) == expected


def test_a_pool_smaller_than_the_model_length_is_the_limit():
    assert refusal(Cluster(num_blocks=6), 1, ONES, 11) == (RejectReason.TOO_MANY_TOKENS, "max_output_tokens", 20, 21)
    cluster = Cluster(num_blocks=6)
    assert isinstance(cluster.submit(1, ONES, 10), Accepted)
    cluster.run()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"min_output": 6}, "min_output_tokens"), ({"num_sequences": 0}, "num_sequences"), ({"priority": 7}, "priority"),
        ({"cache_namespace": b"short"}, "cache_namespace"), ({"history": (b"",), "num_sequences": 2}, "history"),
    ],
)  # fmt: skip
def test_a_malformed_message_names_its_field(values, field):
    assert refusal(Cluster(), 1, ONES, 5, **values)[:2] == (RejectReason.INVALID, field)


def test_an_open_key_is_not_taken_twice():
    cluster = Cluster()
    cluster.submit(1, ONES, 5)
    assert refusal(cluster, 1, ONES, 5)[0] is RejectReason.DUPLICATE_KEY
    cluster.run()


def test_the_queue_is_bounded_in_requests_and_in_tokens():
    cluster = Cluster(max_queued_requests=2, max_queued_tokens=25)
    cluster.submit(1, ONES, 5)
    answer = cluster.submit(2, [1] * 16, 5)
    assert isinstance(answer, Rejected) and answer.reason is RejectReason.OVERLOADED and answer.retry_after_ms > 0
    cluster.submit(3, ONES, 5)
    assert refusal(cluster, 4, [1], 5)[0] is RejectReason.OVERLOADED
    cluster.plan()  # admitted requests no longer count
    assert isinstance(cluster.submit(5, ONES, 5), Accepted)
    cluster.run()


def test_a_come_back_is_not_refused_and_goes_on_after_its_history():
    first = Cluster()
    first.submit(1, ONES, 9, seed=5)
    first.run()
    output = first.streams[1, 0].tokens
    cluster = Cluster(max_queued_requests=1)
    cluster.submit(7, ONES, 5)
    cluster.submit(1, ONES, 9, seed=5, history=(pack_u32(output[:4]),))
    cluster.submit(2, ONES, 9, seed=5, history=(pack_u32(output),))
    assert cluster.streams[2, 0].reason is FinishReason.LENGTH
    cluster.run()
    assert cluster.streams[1, 0].tokens == output


def test_deadline_time_budget_and_queue_time_end_requests_by_time_alone():
    cluster = Cluster(max_num_seqs=1, max_plans_in_flight=1)
    cluster.submit(1, ONES, 40, time_budget_ms=5)
    cluster.step()
    cluster.submit(2, ONES, 40, max_queue_ms=2)
    cluster.submit(3, ONES, 40, deadline_ms=8)
    assert cluster.scheduler.next_wakeup() == 3000
    cluster.run()
    assert [cluster.streams[key, 0].reason for key in (1, 2, 3)] == [
        FinishReason.TIME_LIMIT, FinishReason.QUEUE_TIME_EXCEEDED, FinishReason.DEADLINE_EXCEEDED,
    ]  # fmt: skip
    assert 1 <= len(cluster.streams[1, 0].tokens) < 40 and cluster.streams[2, 0].tokens == []


@pytest.mark.parametrize(("limit", "reason"), [
    ({"deadline_ms": 3}, FinishReason.DEADLINE_EXCEEDED), ({"time_budget_ms": 3}, FinishReason.TIME_LIMIT),
])  # fmt: skip
def test_time_that_runs_out_frees_the_blocks_of_a_running_request_with_the_next_plan(limit, reason):
    """Two plans are in flight when it happens; the next one already gives its row and blocks to somebody else."""
    cluster = Cluster(max_num_seqs=1, num_blocks=14, max_plans_in_flight=3)
    cluster.submit(1, ONES, 40, **limit)
    cluster.submit(2, [0] * 36, 4)
    cluster.plan()
    cluster.plan()
    cluster.now = 3000
    plan = cluster.plan()
    assert cluster.streams[1, 0].reason is reason
    assert [entry.row for entry in plan.admissions] == view_u32(plan.released).tolist() == [0]
    assert cluster.scheduler.stats().num_blocks_referenced == 8  # one step's 32 tokens of the second
    cluster.run()


def test_without_a_rate_nothing_is_refused_for_its_deadline():
    cluster = Cluster()
    assert isinstance(cluster.submit(1, ONES, 40, deadline_ms=1), Accepted)
    cluster.run()


def test_what_cannot_finish_at_the_current_rate_is_refused():
    cluster = warmed_up(10_000)
    reason, field, limit, actual = refusal(cluster, 1, ONES, 40, deadline_ms=100)
    assert (reason, field, limit) == (RejectReason.DEADLINE_UNREACHABLE, "deadline_ms", 100) and 350 <= actual <= 450
    # It may stop by itself after one token, so nothing is certain.
    assert isinstance(cluster.submit(2, ONES, 40, deadline_ms=100, stops=(1,)), Accepted)
    assert isinstance(cluster.submit(3, ONES, 40, deadline_ms=1000), Accepted)


def test_a_time_budget_that_ends_before_the_deadline_ends_well():
    cluster = warmed_up(10_000)
    assert refusal(cluster, 1, ONES, 40, deadline_ms=100, time_budget_ms=100)[0] is RejectReason.DEADLINE_UNREACHABLE
    assert isinstance(cluster.submit(2, ONES, 40, deadline_ms=100, time_budget_ms=50), Accepted)
    cluster.step()
    cluster.now += 50_000
    cluster.run()
    assert cluster.streams[2, 0].reason is FinishReason.TIME_LIMIT and 1 <= len(cluster.streams[2, 0].tokens) < 40


def test_a_deadline_that_became_unreachable_in_the_queue_ends_there():
    cluster = warmed_up(10_000, max_num_seqs=1)
    cluster.submit(1, ONES, 40)
    cluster.plan()
    cluster.submit(2, ONES, 40, deadline_ms=450)
    while (1, 0) in cluster.streams and cluster.streams[1, 0].reason is None:
        cluster.now += 10_000
        cluster.apply()
        cluster.plan()
    assert cluster.streams[2, 0].reason is FinishReason.DEADLINE_EXCEEDED and cluster.streams[2, 0].tokens == []


@pytest.mark.parametrize("field", ["block_size", "num_blocks", "max_num_seqs", "max_plans_in_flight"])
def test_a_configuration_that_cannot_work_names_the_field(field):
    with pytest.raises(ValueError, match=field):
        make_config(**{field: 0})


def test_more_rows_than_tokens_in_a_step_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(block_size=4, num_blocks=8, max_model_len=16, max_num_seqs=9, max_num_batched_tokens=8)


def test_the_start_of_an_epoch_carries_the_sizes():
    start = Scheduler(make_config(), epoch=7).start_epoch()
    assert (start.epoch, start.num_blocks, start.block_size, start.max_num_seqs, start.max_model_len) == (7, 64, 4, 4, 64)


def test_make_submit_is_a_valid_request():
    assert isinstance(Scheduler(make_config(), epoch=1).submit(make_submit(1, ONES, 2), 0), Accepted)


def test_nobody_is_refused_for_how_slow_the_first_steps_were():
    estimates = Estimates()
    estimates.applied(0, 1, 1, 60_000)
    assert estimates.finish_us(10, 7000, 32) == 0
    for step in range(FEWEST_MEASURED):
        estimates.applied(60_000, 1, 1, 62_000 + 2000 * step)
    assert estimates.finish_us(10, 7000, 32) > 0


def test_a_very_slow_first_step_is_forgotten_once_others_are_known():
    estimates = Estimates()
    estimates.applied(0, 1, 1, 5_000_000)
    assert estimates.queue_us(10) == 0
    for step in range(FEWEST_MEASURED):
        estimates.applied(0, 1, 1, 5_000_000 + 2000 * (step + 1))
    assert estimates.finish_us(10, 100, 32) == 200_000 and estimates.queue_us(10) == 20_000
