"""Batches for front ends: one entry per sequence however many results they gather, and log-probabilities beside their tokens."""

import numpy as np
from core.cluster import Cluster, key_of, make_config, make_submit

from pagecast_scheduler.core.outputs import Outputs
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32, view_u32, view_u64
from pagecast_wire.result import FLAG_BAD, FLAG_STOP, StepResult


def test_results_taken_together_have_one_entry_per_sequence():
    outputs = Outputs()
    for key, sequence, offset, token in ((7, 0, 4, 10), (3, 1, 0, 20), (7, 0, 5, 11), (3, 0, 9, 30), (7, 0, 6, 12)):
        outputs.add_token(1, key_of(1, key), sequence, offset, token)
    outputs.num_steps = 3
    ((slot, batch),) = outputs.take(5)
    assert (slot, batch.step) == (1, 5)
    assert view_u64(batch.keys).tolist() == [key_of(1, 3), key_of(1, 3), key_of(1, 7)]
    assert view_u32(batch.sequences).tolist() == [0, 1, 0]
    assert view_u32(batch.offsets).tolist() == [9, 0, 4]
    assert view_u32(batch.counts).tolist() == [1, 1, 3]
    assert view_u32(batch.tokens).tolist() == [30, 20, 10, 11, 12]
    assert outputs.take(6) == []


def test_a_single_step_is_told_as_it_is():
    outputs = Outputs()
    for key, offset, token in ((7, 4, 10), (3, 9, 30)):
        outputs.add_token(2, key_of(2, key), 0, offset, token)
    outputs.num_steps = 1
    ((_, batch),) = outputs.take(5)
    assert view_u64(batch.keys).tolist() == [key_of(2, 7), key_of(2, 3)]
    assert view_u32(batch.offsets).tolist() == [4, 9] and view_u32(batch.counts).tolist() == [1, 1]
    assert view_u32(batch.tokens).tolist() == [10, 30]
    assert outputs.num_steps == 0


def test_steps_of_one_cohort_are_stacked():
    scheduler = prefilled(3)
    for step, tokens in enumerate(([8, 6, 9], [18, 16, 19], [28, 26, 29]), start=1):
        scheduler.plan_step(0)
        scheduler.apply_result(StepResult(1, step, 0, pack_u32(tokens), bytes(3)), 0)
    ((_, batch),) = scheduler.take_batches()
    assert view_u64(batch.keys).tolist() == [1, 2, 3]
    assert view_u32(batch.offsets).tolist() == [0, 0, 0] and view_u32(batch.counts).tolist() == [3, 3, 3]
    assert view_u32(batch.tokens).tolist() == [8, 18, 28, 6, 16, 26, 9, 19, 29]


def test_several_steps_between_two_takes():
    cluster = Cluster(max_plans_in_flight=4)
    for key in (1, 2):
        cluster.submit(key_of(key, key), [1, 0, key & 1], 9)
    for _ in range(4):
        cluster.plan()
    while cluster.results:
        cluster.scheduler.apply_result(cluster.results.popleft(), 0)
    cluster.check()
    assert [len(stream.tokens) for stream in cluster.streams.values()] == [4, 4]
    cluster.run()


def prefilled(num_requests):
    scheduler = Scheduler(make_config(), epoch=1)
    for key in range(1, num_requests + 1):
        scheduler.submit(make_submit(key, [1, 0, 1], 9, stops=(5,)), 0)
    scheduler.plan_step(0)
    scheduler.take_batches()
    return scheduler


def test_log_probabilities_go_with_their_tokens():
    scheduler = prefilled(3)
    result = StepResult(
        1, 1, 0, pack_u32([8, 5, 9]), bytes([0, FLAG_STOP, 0]), logprob_rows=pack_u32([0, 1]),
        logprobs=np.array([-0.5, -1.5], "<f4").tobytes(), top_counts=pack_u32([2, 1]), top_ids=pack_u32([8, 7, 5]),
        top_logprobs=np.array([-0.5, -1.0, -1.5], "<f4").tobytes(),
    )  # fmt: skip
    scheduler.apply_result(result, 0)
    ((_, batch),) = scheduler.take_batches()
    first, second = batch.logprobs
    assert (first.key, first.offset, first.logprob, view_u32(first.top_ids).tolist()) == (1, 0, -0.5, [8, 7])
    assert (second.key, second.offset, second.logprob, view_u32(second.top_ids).tolist()) == (2, 0, -1.5, [5])
    assert [end.key for end in batch.finished] == [2] and view_u32(batch.tokens).tolist() == [8, 5, 9]


def test_a_bad_row_among_good_ones_loses_only_its_own_token():
    scheduler = prefilled(3)
    scheduler.apply_result(StepResult(1, 1, 0, pack_u32([8, 6, 9]), bytes([0, FLAG_BAD, 0])), 0)
    ((_, batch),) = scheduler.take_batches()
    assert view_u64(batch.keys).tolist() == [1, 3] and view_u32(batch.tokens).tolist() == [8, 9]
